"""An engine without a job: `asyncrl engine MODEL`, for `engine.external` of one job after the other.

It is launched as a job launches its own engines, on a CPU too, and goes on until it is stopped. A restart of a job then
costs no start of an engine. A guardian ends it and removes its files, as in a job.
"""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
from pathlib import Path

from asyncrl.config.layout import DRIVER_NODE, EnginePlacement
from asyncrl.config.machine import Machine
from asyncrl.config.placement.threads import threads_on_cpu
from asyncrl.config.sections.inference import ServedModelConfig
from asyncrl.errors import ConfigError, counted
from asyncrl.host.foreground import run_in_foreground
from asyncrl.host.process import INHERITED, ProcessSpec
from asyncrl.inference.building import is_small, with_kernels
from asyncrl.inference.engines.ports import EnginePorts
from asyncrl.inference.sglang.launch import engine_argv, engine_environment

GRACE_S = 10.0
"""From the signal that stops the engine to its end by force, in which it may finish what it generates."""


def standalone_engine(settings: ServedModelConfig, *, port: int, host: str, machine: Machine) -> ProcessSpec:
    """The process of an engine that serves `settings.path` at `host`:`port`, and writes to the terminal.

    It binds the two ports after `port` too. Raises ConfigError for a directory without a model, and where there are
    fewer GPUs than ranks.
    """
    assert settings.path is not None, "the command names it"
    if not (settings.path / "config.json").is_file():
        raise ConfigError(f"{settings.path} is no Hugging Face model directory: it holds no config.json")
    ranks, device = settings.tensor_parallel, machine.device
    if device == "cuda" and ranks > len(machine.gpus):
        raise ConfigError(
            f"--tensor-parallel: {counted(ranks, 'rank')} on as many GPUs, and {len(machine.gpus)} visible"
        )
    placement = EnginePlacement(
        engine_id="engine",
        node=DRIVER_NODE,
        tensor_parallel=ranks,
        gpus=tuple(range(ranks)) if device == "cuda" else (),
        visible_devices=",".join(machine.gpus[:ranks]),
        transport="broadcast",
    )
    argv = engine_argv(
        with_kernels(settings, settings.path, device),
        placement,
        EnginePorts.from_base(port),
        model_path=settings.path,
        host=host,
        device=device,
        dtype="bfloat16" if device == "cuda" else "float32",
        context_length=settings.context_length,
    )
    scratch = threads = None
    if device == "cpu":
        scratch = Path(tempfile.gettempdir()) / f"asyncrl-{secrets.token_hex(4)}" / "0"
        shares = threads_on_cpu(machine, ranks)
        threads = shares.small_engine if is_small(settings.path) else shares.engine_beside_trainer
    environment = engine_environment(
        settings, placement, os.environ, threads=threads, cores=machine.cpus, scratch=scratch
    )
    return ProcessSpec(
        name="engine",
        argv=argv,
        env=environment,
        log_path=INHERITED,
        scratch=None if scratch is None else str(scratch),
    )


def run_engine(settings: ServedModelConfig, *, port: int, host: str) -> int:
    """Runs that engine until it ends or is stopped; returns its exit code. Raises ConfigError also where one of its
    ports is taken."""
    for needed in range(port, port + 3):
        _check_free(host, needed)
    spec = standalone_engine(settings, port=port, host=host, machine=Machine.detect())
    url = f"http://{host}:{port}"
    print(f"engine of {settings.path} at {url}; a job takes it with --engine.external {url}", flush=True)
    return run_in_foreground(spec, grace_s=GRACE_S)


def _check_free(host: str, port: int) -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"--port: the engine cannot listen at {host}:{port} ({error.strerror}); it needs that port and the "
                "next two"
            ) from error
