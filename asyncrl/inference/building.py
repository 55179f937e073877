"""Makes engines and routers: addresses, ports, launch lines, and the clients that speak to them.

Invariants
- Every port comes from one allocator and stays reserved until `close`, so that a restarted process finds its own.
- What engines leave in temporary files goes with `close`, whatever happened before.
"""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import anyio.to_thread

from asyncrl.config import Config
from asyncrl.config.layout import EnginePlacement, ExternalEngine, ProcessLayout
from asyncrl.config.sections.inference import EngineConfig, ServingConfig
from asyncrl.data.fleet import EngineEndpoint
from asyncrl.host import ProcessSpec
from asyncrl.inference.engines.engine import ManagedEngine
from asyncrl.inference.engines.ports import PortAllocator
from asyncrl.inference.engines.scratch import Scratch
from asyncrl.inference.routing.router_client import RouterClient
from asyncrl.inference.sglang.engine_api import new_session
from asyncrl.inference.sglang.launch import engine_argv, engine_environment, router_argv
from asyncrl.observability.events import EventLog


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What all engines of one group have in common."""

    name: str
    path: Path
    config: EngineConfig | ServingConfig
    context_length: int | None
    frozen: bool = False


class Builder:
    """The workshop of one controller. Nothing of it lives; what it makes is started by others."""

    def __init__(self, config: Config, layout: ProcessLayout, *, run_dir: Path, events: EventLog) -> None:
        self._config = config
        self._layout = layout
        self._logs = run_dir / "logs"
        self._events = events
        self._ports = PortAllocator()
        self._scratch = Scratch(run_dir)
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> None:
        """Within the event loop, before anything is made."""
        self._logs.mkdir(parents=True, exist_ok=True)
        self._scratch.create()
        self._session = new_session()

    async def close(self) -> None:
        """Gives back ports, connections and temporary files. May be called again."""
        async with AsyncExitStack() as ends:  # each of them, whatever another raises
            ends.push_async_callback(anyio.to_thread.run_sync, self._scratch.remove)
            ends.callback(self._ports.close)
            if self._session is not None:
                ends.push_async_callback(self._session.close)

    def router(self, name: str, port: int | None = None) -> tuple[RouterClient, ProcessSpec]:
        """A router on `port` (`router.port`), or a free one. Raises ConfigError where the port is taken."""
        config = self._config
        port = self._ports.single() if port is None else self._ports.given(port, "router.port")
        host, prometheus_port = config.run.host, self._ports.single()
        argv = router_argv(config.router, host=host, port=port, prometheus_port=prometheus_port)
        spec = ProcessSpec(name=name, argv=argv, env={}, log_path=str(self._logs / f"{name}.log"))
        metrics_url = f"http://{host}:{prometheus_port}/metrics"
        return RouterClient(f"http://{host}:{port}", self._open_session, metrics_url=metrics_url), spec

    def engine(self, placement: EnginePlacement, model: ServedModel) -> tuple[ManagedEngine, ProcessSpec]:
        """An engine of `model` as a process of the job's own, and how it is started."""
        config, device, ports = self._config, self._layout.device, self._ports.engine()
        endpoint = EngineEndpoint(
            engine_id=placement.engine_id,
            generation=0,
            url=f"http://{config.run.host}:{ports.http}",
            tensor_parallel=placement.tensor_parallel,
            gpus=placement.gpus,
            colocated=placement.colocated,
        )
        engine = ManagedEngine(
            endpoint, session=self._open_session, events=self._events, model=model.name, frozen=model.frozen
        )
        argv = engine_argv(
            model.config,
            placement,
            ports,
            model_path=model.path,
            host=config.run.host,
            device=device,
            dtype=self._layout.dtype,
            context_length=model.context_length,
        )
        cores = config.engine.cpus or tuple(sorted(os.sched_getaffinity(0)))
        spec = ProcessSpec(
            name=placement.engine_id,
            argv=argv,
            env=engine_environment(placement, device=device, cores=cores, scratch=self._scratch.path),
            log_path=str(self._logs / f"{placement.engine_id}.log"),
            cpus=config.engine.cpus,
        )
        return engine, spec

    def external(self, external: ExternalEngine) -> ManagedEngine:
        """An engine that somebody else runs. What it is, it is asked when it joins."""
        endpoint = EngineEndpoint(external.engine_id, 0, external.url, 1)
        engine = ManagedEngine(endpoint, session=self._open_session, events=self._events)
        engine.reads_copies = self._config.weights.directory is not None
        return engine

    @property
    def _open_session(self) -> aiohttp.ClientSession:
        assert self._session is not None, "the builder was not opened"
        return self._session
