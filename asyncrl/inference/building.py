"""Makes engines and routers: addresses, ports, launch lines, and the clients that speak to them.

Invariants
- A process and its ports belong to the host of the node where the layout places it.
- Every port stays reserved until `close`, so that a process that is started again finds its own.
- Temporary files of engines are removed by `close`, whatever happened before.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import aiohttp
import anyio.to_thread

from asyncrl.config import Config
from asyncrl.config.layout import Device, EnginePlacement, ExternalEngine, ProcessLayout, RouterPlacement
from asyncrl.config.sections.inference import EngineConfig, ServingConfig
from asyncrl.data.fleet import EngineEndpoint, job_name
from asyncrl.data.model_files import weights_bytes
from asyncrl.host import Host, HostedProcess, Hosts, ProcessSpec
from asyncrl.inference.engines.engine import ManagedEngine
from asyncrl.inference.engines.ports import OFFSETS, EnginePorts
from asyncrl.inference.engines.scratch import Scratch
from asyncrl.inference.routing.router_client import RouterClient
from asyncrl.inference.sglang.cpu_platform import PRIVATE
from asyncrl.inference.sglang.engine_api import new_session
from asyncrl.inference.sglang.launch import engine_argv, engine_environment, router_argv
from asyncrl.observability.events import EventLog
from asyncrl.run_directory.engine_key import key_file, make_key


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that all engines of one group serve."""

    name: str
    path: Path
    config: EngineConfig | ServingConfig
    context_length: int | None
    frozen: bool = False


_SMALL_BYTES = 100_000_000
_LEAST_HEAD_DIM = 64
Serving = TypeVar("Serving", EngineConfig, ServingConfig, EngineConfig | ServingConfig)


class Builder:
    """Makes the engines and routers of one controller. It starts none of them."""

    def __init__(
        self,
        config: Config,
        layout: ProcessLayout,
        *,
        hosts: Hosts,
        run_dir: Path,
        events: EventLog,
        overlaps: bool = False,
    ) -> None:
        """`overlaps`: engines generate while the trainer trains."""
        self._config = config
        self._overlaps = overlaps
        self._layout = layout
        self._hosts = hosts
        self._run_dir = run_dir
        self._logs = run_dir / "logs"
        self._key: str | None = None
        self._events = events
        self._reserved: list[tuple[Host, Sequence[int]]] = []
        self._scratch = Scratch(run_dir)
        self._session: aiohttp.ClientSession | None = None
        self.owner = job_name(config.run.dir)
        """Name of the job on engines that outlive it."""

    def open(self) -> None:
        """Prepares directories and the HTTP session. Call it in the event loop, before anything is made."""
        self._logs.mkdir(parents=True, exist_ok=True)
        self._scratch.create()
        self._key = make_key(self._run_dir)
        self._session = new_session()

    async def close(self) -> None:
        """Gives back ports, connections and temporary files; may be called again."""
        async with AsyncExitStack() as ends:  # each of them, whatever another raises
            ends.push_async_callback(anyio.to_thread.run_sync, self._scratch.remove)
            ends.callback(key_file(self._run_dir).unlink, missing_ok=True)
            ends.push_async_callback(self._release_ports)
            if self._session is not None:
                ends.push_async_callback(self._session.close)

    async def router(self, placement: RouterPlacement, port: int | None = None) -> tuple[RouterClient, HostedProcess]:
        """A router on `port` (`router.port`), or on a free port. Raises ConfigError where the port is taken."""
        config, name, host = self._config, placement.name, self._hosts[placement.node]
        if port is None:
            port = await self._reserve(host)
        else:
            await host.reserve_given_port(port, "router.port")
            self._reserved.append((host, (port,)))
        address, prometheus_port = config.run.host, await self._reserve(host)
        argv = router_argv(config.router, host=address, port=port, prometheus_port=prometheus_port)
        spec = ProcessSpec(name=name, argv=argv, env=self._private, log_path=str(self._logs / f"{name}.log"))
        metrics_url = f"http://{address}:{prometheus_port}/metrics"
        client = RouterClient(
            f"http://{address}:{port}",
            self._open_session,
            metrics_url=metrics_url,
            owner=self.owner,
            key=self._key,
        )
        return client, HostedProcess(spec, host)

    async def engine(self, placement: EnginePlacement, model: ServedModel) -> tuple[ManagedEngine, HostedProcess]:
        """An engine of `model` as a process of the job's own, on the node of its placement."""
        config, device, host = self._config, self._layout.device, self._hosts[placement.node]
        ports = EnginePorts.from_base(await self._reserve(host, OFFSETS))
        endpoint = EngineEndpoint(
            engine_id=placement.engine_id,
            generation=0,
            url=f"http://{config.run.host}:{ports.http}",
            tensor_parallel=placement.tensor_parallel,
            gpus=placement.gpus,
            trainer_ranks=placement.trainer_ranks,
        )
        engine = ManagedEngine(
            endpoint,
            session=self._open_session,
            events=self._events,
            model=model.name,
            frozen=model.frozen,
            key=self._key,
        )
        argv = engine_argv(
            with_kernels(model.config, model.path, device),
            placement,
            ports,
            model_path=model.path,
            host=config.run.host,
            device=device,
            dtype=self._layout.dtype,
            context_length=model.context_length,
        )
        cores = config.engine.cpus or tuple(sorted(os.sched_getaffinity(0)))
        scratch = self._scratch.next() if device == "cpu" else None
        spec = ProcessSpec(
            name=placement.engine_id,
            argv=(*argv, "--config", str(key_file(self._run_dir))),
            env={
                **engine_environment(
                    model.config,
                    placement,
                    os.environ,
                    threads=self._layout.engine_threads(
                        placement.engine_id, overlaps=self._overlaps, small=is_small(model.path)
                    ),
                    cores=cores,
                    scratch=scratch,
                ),
                **self._private,
            },
            log_path=str(self._logs / f"{placement.engine_id}.log"),
            cpus=config.engine.cpus,
            scratch=None if scratch is None else str(scratch),
        )
        return engine, HostedProcess(spec, host)

    def external(self, external: ExternalEngine) -> ManagedEngine:
        """An engine that somebody else runs. It tells its size and its model when it joins."""
        endpoint = EngineEndpoint(external.engine_id, 0, external.url, 1, external=True)
        engine = ManagedEngine(endpoint, session=self._open_session, events=self._events, owner=self.owner)
        engine.reads_copies = self._config.weights.directory is not None
        return engine

    @property
    def _private(self) -> dict[str, str]:
        """Tells engines and routers where the key is."""
        return {PRIVATE: str(key_file(self._run_dir))}

    async def _reserve(self, host: Host, offsets: Sequence[int] = (0,)) -> int:
        base = await host.reserve_ports(offsets)
        self._reserved.append((host, [base + offset for offset in offsets]))
        return base

    async def _release_ports(self) -> None:
        for host, ports in self._reserved:
            await host.release_ports(ports)
        self._reserved.clear()

    @property
    def _open_session(self) -> aiohttp.ClientSession:
        assert self._session is not None, "the builder was not opened"
        return self._session


def with_kernels(config: Serving, model: Path, device: Device) -> Serving:
    """The settings of engines that serve `model`: attention by Triton where its heads are too small for FlashInfer.

    SGLang takes FlashInfer by itself on most GPUs; the demo's model has such heads. A backend that is given stays.
    """
    if device == "cpu" or "attention_backend" in config.server_args or _head_dim(model) >= _LEAST_HEAD_DIM:
        return config
    return config.model_copy(update={"server_args": {"attention_backend": "triton", **config.server_args}})


def _head_dim(model: Path) -> float:
    """Numbers of one attention head; infinite where config.json does not say it in the usual way."""
    fields = json.loads((model / "config.json").read_text())
    try:
        return float(fields.get("head_dim") or fields["hidden_size"] / fields["num_attention_heads"])
    except (KeyError, TypeError, ZeroDivisionError):
        return math.inf


def is_small(model: Path) -> bool:
    """Whether the model's weights take less than 100 MB on disk."""
    return weights_bytes(model) < _SMALL_BYTES
