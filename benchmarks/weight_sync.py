"""What a weight publication costs over a bare script that makes the same calls to the same engine.

    python benchmarks/weight_sync.py --smollm2 models/smollm2 [--rounds 7]

One real engine for each model (the demo's, 1 M parameters; SmolLM2-135M in float32, see `asyncrl smollm2`), fed by
broadcast over gloo from a thread of this process, as in a job. In every round, in changing order:

- bare: pause, open the session, make a group, broadcast bucket by bucket, close, continue; in 40 plain lines below;
- ours: a whole publication from begin to commit;
- kept: the same with a copy of the weights kept for engines that join later. A thread writes it after the publication,
  and is waited for outside of the measured time. The first three of a job take the host memory and make the files that
  later ones use, and are measured apart.

Ours keeps its group from one publication to the next, so it is held against the bare script without the time for its
group. The first publication to an engine makes the group and proves the weights by checksums; it is measured apart.

Prints a table and writes benchmarks/results/weight_sync.json, with how much other work ran on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import psutil
import structlog
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from asyncrl.config import Config
from asyncrl.config.machine import Machine
from asyncrl.config.placement.rules import plan_layout
from asyncrl.demo.model import build
from asyncrl.host import EngineHost
from asyncrl.inference.controller import InferenceController
from asyncrl.observability.events import EventLog
from asyncrl.run_directory.engine_key import key_file, key_headers, read_key
from asyncrl.tasks import Background
from asyncrl.training.ranks.trainer_thread import TrainerThread
from asyncrl.weights.buckets import TensorSpec, plan_buckets
from asyncrl.weights.copies import KEPT, Copies
from asyncrl.weights.publication import PublicationLimits, PublicationReport
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.transfer import Payload, Sink
from asyncrl.weights.transports import bucket_bytes_of
from asyncrl.weights.transports.broadcast import BroadcastTransport
from asyncrl.weights.transports.broadcast_sink import is_flattened

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 60.0
MOST_RATIO = 1.5
"""Ours over bare, for the large model."""
MOST_OVER_S = 0.15
"""Ours over bare, for the small model."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bare:
    """One run of the bare script, in seconds."""

    total_s: float
    group_s: float
    """The part in which the group was made."""


def bare_sync(url: str, key: str | None, tensors: Mapping[str, Tensor], bucket_bytes: int, name: str) -> Bare:
    """Brings `tensors` into the engine at `url` with nothing around it."""

    def post(endpoint: str, body: Mapping[str, Any]) -> None:
        headers = {"Content-Type": "application/json", **key_headers(key)}
        request = urllib.request.Request(url + endpoint, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            answer = response.read()
        assert b'"success":false' not in answer, answer

    timeout = timedelta(seconds=TIMEOUT_S)
    buckets = plan_buckets(specs_of(tensors), bucket_bytes)
    with ThreadPoolExecutor(1) as background:
        began = time.perf_counter()
        post("/pause_generation", {"mode": "retract"})
        post("/begin_weight_update", {})
        group_began = time.perf_counter()
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=timeout, wait_for_workers=False)
        invitation = {"master_address": "127.0.0.1", "master_port": store.port, "rank_offset": 1, "world_size": 2}
        joined = background.submit(
            post, "/init_weights_update_group", {**invitation, "group_name": name, "backend": "gloo"}
        )
        nested = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
        group = dist.ProcessGroupGloo(nested, 0, 2, timeout)
        joined.result()
        group_s = time.perf_counter() - group_began
        for index, bucket in enumerate(buckets):
            told: dict[str, Any] = {
                "names": [spec.name for spec in bucket],
                "dtypes": [spec.dtype for spec in bucket],
                "shapes": [spec.shape for spec in bucket],
                "group_name": name,
                "load_format": "flattened_bucket" if is_flattened(bucket) else None,
                "flush_cache": index == len(buckets) - 1,
            }
            taken = background.submit(post, "/update_weights_from_distributed", told)
            payload = [tensors[spec.name] for spec in bucket]
            if is_flattened(bucket):
                payload = [torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in payload])]
            for work in [group.broadcast([tensor]) for tensor in payload]:
                work.wait()
            taken.result()
        post("/end_weight_update", {})
        post("/continue_generation", {})
        total_s = time.perf_counter() - began
        post("/destroy_weights_update_group", {"group_name": name})
    return Bare(total_s, group_s)


class ThreadTrainer:
    """A trainer of one rank that holds `tensors` in its thread."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.payload = Payload(specs_of(tensors), self.export)
        self._thread = TrainerThread()

    async def call(self, function: Callable[..., T], *args: object, what: str, timeout_s: float) -> T:
        return await self._thread.call(function, *args, what=what, timeout_s=timeout_s)

    async def export(self, sink: Sink, timeout_s: float) -> None:
        def walk() -> None:
            for name, tensor in self.tensors.items():
                sink.put(name, tensor)
            sink.finish()

        await self.call(walk, what="export", timeout_s=timeout_s)


def specs_of(tensors: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items())


@asynccontextmanager
async def fleet_of_one(config: Config, run: Path, events: EventLog) -> AsyncIterator[InferenceController]:
    async with EngineHost.start(run / "logs") as host, anyio.create_task_group() as tasks:
        controller = InferenceController(
            config,
            hosts={0: host},
            events=events,
            layout=plan_layout(config, Machine()),
            model_path=config.model.path,
            run_dir=run,
        )
        await controller.start(tasks)
        try:
            await controller.wait_ready()
            yield controller
        finally:
            await controller.dispose()


class OtherWork:
    """CPU time that went to anything but this process and what it started."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._at_start = self._elsewhere_s()

    def cores(self) -> float:
        """Cores that others kept busy since this object was made."""
        return max(0.0, (self._elsewhere_s() - self._at_start) / (time.monotonic() - self._began))

    @staticmethod
    def _elsewhere_s() -> float:
        machine = psutil.cpu_times()
        mine = psutil.Process()
        own = sum(sum(process.cpu_times()[:2]) for process in (mine, *mine.children(recursive=True)))
        return machine.user + machine.nice + machine.system - own


async def measure(name: str, model: Path, run: Path, rounds: int) -> dict[str, Any]:
    """All figures of one model."""
    config = Config.model_validate(
        {
            "model": {"path": model},
            "run": {"dir": run},
            "engine": {"max_total_tokens": 4096, "max_running_requests": 16},
        }
    )
    tensors = load_file(model / "model.safetensors")
    bucket_bytes = bucket_bytes_of(config)
    trainer = ThreadTrainer(tensors)
    events = EventLog(run / "events.jsonl")
    published, writes = 0, list[float]()
    limits = PublicationLimits(transfers=1)
    async with fleet_of_one(config, run, events) as controller, anyio.create_task_group() as writing:
        copies = Copies(run / "weights" / "published", Background(writing))
        transport = BroadcastTransport(
            controller.open_engine, backend="gloo", bucket_bytes=bucket_bytes, timeout_s=TIMEOUT_S
        )
        url, key = controller.fleet().engines[0].endpoint.url, read_key(key_file(run))

        async def ours(copies: Copies | None = None) -> PublicationReport:
            nonlocal published
            published += 1
            publisher = Publisher(controller, trainer, transport, events=events, copies=copies, limits=limits)
            report = await publisher.publish(f"0.{published}")
            if copies is not None:
                began = time.monotonic()
                await controller._started.state.wait_copy()
                writes.append(time.monotonic() - began)
                assert controller.copies_in_use(), "the copy was given up"
            return report

        async def first() -> PublicationReport:
            """To an engine that holds no version and is in no group."""
            await transport.aclose()
            if published:
                lease = await controller.begin_weight_update("0.0")
                await controller.abort_weight_update(lease.lease_id, {})
            return await ours()

        controller.health_monitoring_pause()  # the bare script pauses the engine without a word to it
        firsts = [await first() for _ in range(3)]
        new = [await ours(copies) for _ in range(KEPT + 1)]
        made_new, writes = writes, []
        others, bare, plain, kept = OtherWork(), [], [], []

        async def bare_round() -> None:
            group = f"bare-{len(bare)}"
            bare.append(
                await trainer.call(bare_sync, url, key, tensors, bucket_bytes, group, what="bare", timeout_s=600)
            )

        async def plain_round() -> None:
            plain.append(await ours())

        async def kept_round() -> None:
            kept.append(await ours(copies))

        for number in range(rounds):
            order = (bare_round, plain_round, kept_round)
            for step in order[number % 3 :] + order[: number % 3]:
                await step()
        elsewhere = others.cores()
        await transport.aclose()
        await copies.aclose()
    events.close()
    logged = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    pauses = {event["version"]: event["pause_s"] for event in logged if event["kind"] == "weights_published"}
    figures: dict[str, list[float]] = {
        "bare_s": [run.total_s for run in bare],
        "bare_without_group_s": [run.total_s - run.group_s for run in bare],
    }
    for key, reports in {"ours": plain, "kept": kept, "kept_new": new, "first": firsts}.items():
        figures[f"{key}_s"] = [report.seconds for report in reports]
        figures[f"{key}_pause_s"] = [pauses[report.version] for report in reports]
        figures[f"{key}_transfer_s"] = [report.transfer_s for report in reports]
    figures["write_s"], figures["write_new_s"] = writes, made_new
    return {
        "model": name,
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "mib": sum(tensor.nbytes for tensor in tensors.values()) / (1 << 20),
        "buckets": len(plan_buckets(specs_of(tensors), bucket_bytes)),
        "cores_busy_elsewhere": elsewhere,
        "load_average": os.getloadavg()[0],
        **{key: [round(value, 4) for value in values] for key, values in figures.items()},
    }


def median(result: Mapping[str, Any], key: str) -> float:
    return statistics.median(result[key])


def show(result: Mapping[str, Any]) -> None:
    print(
        f"\n{result['model']}: {result['parameters'] / 1e6:.2f} M parameters, {result['mib']:.1f} MiB in "
        f"{result['buckets']} bucket(s); other work kept {result['cores_busy_elsewhere']:.2f} cores busy"
    )
    print(f"{'':34}{'median s':>10}{'range':>18}{'pause s':>10}{'over bare':>12}{'ratio':>8}")
    base = median(result, "bare_without_group_s")
    for key, label in {
        "bare": "bare script",
        "bare_without_group": "bare script without its group",
        "ours": "publication",
        "kept": "publication, copy kept on disk",
        "kept_new": "  of these the first three",
        "first": "first publication, proved",
    }.items():
        times = result[f"{key}_s"]
        pause = f"{median(result, f'{key}_pause_s'):10.3f}" if f"{key}_pause_s" in result else " " * 10
        against = median(result, "bare_s") if key == "first" else base
        row = f"{label:34}{median(result, f'{key}_s'):10.3f}{f'{min(times):.3f} - {max(times):.3f}':>18}{pause}"
        print(row + f"{median(result, f'{key}_s') - against:12.3f}{median(result, f'{key}_s') / against:8.2f}")
    print(
        f"a copy is on disk {median(result, 'write_s'):.3f} s after its publication, each of the first three "
        f"{median(result, 'write_new_s'):.3f} s"
    )


async def run_all(smollm2: Path, rounds: int) -> list[dict[str, Any]]:
    results = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        work = Path(directory)
        await anyio.to_thread.run_sync(build, work / "demo")
        for name, model in (("demo", work / "demo"), ("SmolLM2-135M", smollm2)):
            run = anyio.Path(work / f"run-{name}")
            await run.mkdir()
            results.append(await measure(name, model, Path(run), rounds))
            show(results[-1])
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", type=Path, required=True, help="made by `asyncrl smollm2 DIR`")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    small, large = anyio.run(run_all, arguments.smollm2, arguments.rounds, backend_options={"use_uvloop": True})
    over_s = median(small, "ours_s") - median(small, "bare_without_group_s")
    ratios = {key: median(large, f"{key}_s") / median(large, "bare_without_group_s") for key in ("ours", "kept")}
    print(f"\nsmall model: {1e3 * over_s:.0f} ms over the bare script (at most {1e3 * MOST_OVER_S:.0f})")
    print(
        f"large model: {ratios['ours']:.2f} times the bare script, {ratios['kept']:.2f} with a copy kept (1.5 at most)"
    )
    results = ROOT / "benchmarks" / "results" / "weight_sync.json"
    summary = {
        "cores": len(os.sched_getaffinity(0)),
        "small_over_s": over_s,
        "large_ratio": ratios,
        "models": [small, large],
    }
    results.write_text(json.dumps(summary, indent=2) + "\n")
    assert over_s <= MOST_OVER_S and max(ratios.values()) <= MOST_RATIO


if __name__ == "__main__":
    main()
