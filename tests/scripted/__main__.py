"""Scripted engines in a process of their own, which a test can really kill or stop.

    python -m tests.scripted --count 3 --token-s 0.01 --seed 7

Once all engines listen, it prints one line, a JSON list of their URLs. It serves until it is killed. To set the faults
of an engine, post to its URL:

    POST /scripted/faults {"faults": [{"endpoint": "generate", "kind": "status", "status": 503}]}

That replaces its faults so far; `--faults` sets the first ones for all engines. GET /scripted/state returns its state.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from typing import Any

import anyio
import anyio.abc
import msgspec
import torch

from tests.scripted.engine import ScriptedEngine
from tests.scripted.faults import Fault
from tests.scripted.generation import Latency


def parse(argv: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="tests.scripted")
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument(
        "--port", type=int, default=0, help="port of the first engine; the others follow. 0: free ports"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--token-s", type=float, default=0.0)
    parser.add_argument("--prefill-s", type=float, default=0.0)
    parser.add_argument("--spread", type=float, default=0.0)
    parser.add_argument("--mean-tokens", type=float, default=None)
    parser.add_argument("--vocab-size", type=int, default=1 << 20)
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--faults", default="[]", help="JSON list of faults for every engine")
    return parser.parse_args(argv)


async def serve(options: argparse.Namespace, *, task_status: anyio.abc.TaskStatus[list[str]]) -> None:
    """Runs the engines; its start value is their URLs."""
    latency = Latency(options.prefill_s, options.token_s, options.spread, options.mean_tokens)
    faults: list[Any] = json.loads(options.faults)
    engines = [
        ScriptedEngine(
            latency=latency, slots=options.slots, vocab_size=options.vocab_size, seed=options.seed + 1000 * number
        )
        for number in range(options.count)
    ]
    async with anyio.create_task_group() as task_group:
        for number, engine in enumerate(engines):
            engine.script(*(msgspec.convert(fault, Fault) for fault in faults))
            port = options.port + number if options.port else 0
            await task_group.start(engine.run, port, options.host)
        task_status.started([engine.url for engine in engines])


async def main(argv: list[str]) -> None:
    """Runs the engines that `argv` asks for, and prints their URLs."""
    torch.set_num_threads(1)
    async with anyio.create_task_group() as task_group:
        urls = await task_group.start(partial(serve, parse(argv)))
        print(json.dumps(urls), flush=True)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1:], backend_options={"use_uvloop": True})
