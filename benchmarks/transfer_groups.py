"""What one process group per engine costs over one group of all engines, on gloo.

    python benchmarks/transfer_groups.py [--rounds 9]

A trainer process sends buckets of 64 MiB to 1 to 5 receiving processes on this machine, and nobody loads what came. In
every round both forms send 5 MB and 500 MB, in changing order:

- one: one group of everybody, in which gloo passes a message on along a tree;
- each: a group for each engine, to all of which the trainer sends at once.

Prints a table of medians and writes benchmarks/results/transfer_groups.json.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
ENGINES = (1, 2, 3, 4, 5)
SIZES = {"5 MB": 5_000_000, "500 MB": 500_000_000}
BUCKET_BYTES = 64 << 20
RESULTS = Path(__file__).parent / "results" / "transfer_groups.json"
TIMEOUT = timedelta(seconds=120)


def group_of(store: TCPStore, name: str, rank: int, world_size: int) -> ProcessGroupGloo:
    return ProcessGroupGloo(PrefixStore(name, store), rank, world_size, TIMEOUT)


def broadcast(group: Any, tensor: Tensor) -> Any:
    options = BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = 0, 0, TIMEOUT
    return group.broadcast([tensor], options)


def buckets_of(size_bytes: int) -> list[int]:
    return [min(BUCKET_BYTES, size_bytes - at) for at in range(0, size_bytes, BUCKET_BYTES)]


def receive(port: int, engines: int, number: int, plan: list[tuple[str, str]]) -> None:
    """One engine: receives what `plan` says, (form, size) after (form, size)."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, 1 + engines, is_master=False, timeout=TIMEOUT)
    groups = {"one": group_of(store, "one", 1 + number, 1 + engines), "each": group_of(store, f"each-{number}", 1, 2)}
    buffer = torch.empty(BUCKET_BYTES, dtype=torch.uint8)
    for at, (form, size) in enumerate(plan):
        for bucket_bytes in buckets_of(SIZES[size]):
            broadcast(groups[form], buffer[:bucket_bytes]).wait()
        store.set(f"done-{at}-{number}", "")


def measure(engines: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round, by `form, size`."""
    plan: list[tuple[str, str]] = []
    for number in range(rounds + 1):
        forms = ("one", "each") if number % 2 else ("each", "one")
        plan += [(form, size) for size in SIZES for form in forms]
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1", port, 1 + engines, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    command = [sys.executable, __file__, "--receive", str(port), str(engines)]
    children = [subprocess.Popen([*command, str(number), json.dumps(plan)]) for number in range(engines)]
    try:
        one = group_of(store, "one", 0, 1 + engines)
        groups = {"one": [one], "each": [group_of(store, f"each-{number}", 0, 2) for number in range(engines)]}
        source = torch.randint(0, 255, (BUCKET_BYTES,), dtype=torch.uint8)
        seconds: dict[str, list[float]] = {}
        for at, (form, size) in enumerate(plan):
            began = time.perf_counter()
            for bucket_bytes in buckets_of(SIZES[size]):
                works = [broadcast(group, source[:bucket_bytes]) for group in groups[form]]
                while not all(work.is_completed() for work in works):
                    time.sleep(0.0005)
                for work in works:
                    work.wait()
            store.wait([f"done-{at}-{number}" for number in range(engines)], TIMEOUT)
            if at >= len(SIZES) * 2:  # the first round meets cold memory
                seconds.setdefault(f"{form}, {size}", []).append(round(time.perf_counter() - began, 4))
        return seconds
    finally:
        for child in children:
            child.wait(120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--receive", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.receive:
        port, engines, number, plan = arguments.receive
        receive(int(port), int(engines), int(number), json.loads(plan))
        return
    torch.set_num_threads(1)
    results: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "load_average": os.getloadavg()[0], "seconds": {}}
    print(f"{'engines':>8}" + "".join(f"{f'{form}, {size}':>16}" for size in SIZES for form in ("one", "each")))
    for engines in ENGINES:
        seconds = results["seconds"][str(engines)] = measure(engines, arguments.rounds)
        medians = [statistics.median(seconds[f"{form}, {size}"]) for size in SIZES for form in ("one", "each")]
        print(f"{engines:>8}" + "".join(f"{value:>14.3f} s" for value in medians))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
