"""One scripted engine, or the scripted router, as a process of its own, for a host that really spawns, stops and kills.

python -m tests.scripted.process engine --host 127.0.0.1 --port 30000 --tensors 8
python -m tests.scripted.process router --host 127.0.0.1 --port 30001
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import anyio
import torch
from torch import Tensor

from asyncrl.inference.sglang.cpu_platform import PRIVATE
from asyncrl.run_directory.engine_key import read_key
from tests.scripted.engine import ScriptedEngine
from tests.scripted.router import ScriptedRouter
from tests.scripted.server import ScriptedServer

LARGE = (1024, 512)
"""2 MiB: travels alone."""
SMALL = (64,)


def shapes(tensors: int) -> dict[str, tuple[int, ...]]:
    """`tensors` large ones, each followed by three small ones, by name."""
    named: dict[str, tuple[int, ...]] = {}
    for number in range(tensors):
        named[f"layer.{number}.weight"] = LARGE
        named |= {f"layer.{number}.norm.{part}": SMALL for part in range(3)}
    return named


def zeros(tensors: int) -> dict[str, Tensor]:
    """What an engine holds at its start."""
    return {name: torch.zeros(shape) for name, shape in shapes(tensors).items()}


def command(role: str, *, host: str, port: int, tensors: int = 0) -> tuple[str, ...]:
    """The argv of such a process."""
    flags = ("--host", host, "--port", str(port), "--tensors", str(tensors))
    return (sys.executable, "-m", "tests.scripted.process", role, *flags)


async def main(argv: Sequence[str]) -> None:
    """Serves until it is killed."""
    parser = argparse.ArgumentParser(prog="tests.scripted.process")
    parser.add_argument("role", choices=("engine", "router"))
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tensors", type=int, default=0)
    parser.add_argument("--config")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    server: ScriptedServer = ScriptedRouter() if options.role == "router" else ScriptedEngine(zeros(options.tensors))
    server.key = read_key(Path(os.environ[PRIVATE])) if PRIVATE in os.environ else None
    await server.run(options.port, options.host)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1:], backend_options={"use_uvloop": True})
