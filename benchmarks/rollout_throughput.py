"""How fast samples come in: a bare aiohttp loop, the whole executor, and httpx as it is usually used, side by side.

    python benchmarks/rollout_throughput.py [--rows noop,paced,real]

- *noop*: against an engine that answers at once (noop_engine.py, a process on the other core): 1,000 tokens with
  log-probs, 512 in flight. The client is the limit; rounds of all clients take turns.
- *paced*: the engine takes 1 s ± 50 % (512 in flight) or 8 s ± 50 % (4,096 in flight) for an answer. Offered is what
  so many requests in flight can get; told are what of that was served, how late the event loop turned, and the share of
  the core.
- *real*: a real engine on the other core, asked directly and through the router, by each client in turn. The ratio of
  wall times to the bare loop comes with the upper end of its 95 % confidence interval (one-sided, over log-ratios).

Clients (rollout_clients.py) run in this process on uvloop, on the first core that it may use, engines on the last. The
interpreter is set up as in a job (asyncrl/run/interpreter.py), for all of them. `starved` is the share of time in which
this process had work and got no CPU: on a shared machine that, too, makes a loop late. What was measured is put into
benchmarks/results/rollout_throughput.json, part by part; parts that were not run stay as they were.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx
import structlog
from noop_engine import VOCABULARY
from rollout_clients import CLIENTS, Load, Run

from asyncrl.config import Config
from asyncrl.config.machine import Machine
from asyncrl.config.placement.rules import plan_layout
from asyncrl.data.fleet import UpdateAck
from asyncrl.data.tokenizer import PolicyTokenizer
from asyncrl.demo.model import build
from asyncrl.host import EngineHost
from asyncrl.inference.controller import InferenceController
from asyncrl.observability.events import EventLog
from asyncrl.run.interpreter import settle

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "rollout_throughput.json"
BARE, OURS, USUAL = CLIENTS
GROUPS, SAMPLES, TOKENS, PROMPT = 64, 8, 1000, 512
"""Of a batch against the no-op engine."""
HTTPX_SHARE = 8
"""httpx is measured over so many times fewer samples, since it takes ten times as long or more."""
HTTPX_SKIP, HTTPX_PACED = 1024, 512
"""Samples that do not count, since to open its connections takes minutes; and paced ones that do."""
PACES = ((1.0, 512, tuple(CLIENTS)), (8.0, 4096, (BARE, OURS)))
"""Mean latency in seconds, requests in flight, clients. httpx takes minutes to begin with 4,096."""
JITTER = 0.5
REAL_GROUPS, REAL_SAMPLES, REAL_TOKENS, REAL_IN_FLIGHT, REAL_PROMPT = 16, 8, 48, 64, 48
LEAST_OF_BARE, LEAST_OF_HTTPX = 0.7, 10.0
MOST_LAG_S, MOST_CORE, LEAST_SERVED = 0.010, 0.40, 0.97
MOST_WALL = {"direct": 1.08, "router": 1.12}
"""Upper bound of executor over bare loop."""
T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753)
"""One-sided 95 % quantile of Student's t for 1, 2, … degrees of freedom."""
TICK_S = 0.005


@dataclass
class Window:
    """Measures `count` samples after the first `skip`."""

    skip: int
    count: int
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    """Cancelled at the end."""
    done: int = 0
    began: tuple[float, float] = (0.0, 0.0)
    ended: tuple[float, float] = (0.0, 0.0)
    """time.perf_counter() and time.process_time()."""
    lags: list[float] = field(default_factory=list)
    starved_s: float = 0.0

    def add(self, samples: int) -> None:
        before, self.done = self.done, self.done + samples
        if before < self.skip <= self.done:
            self.began = time.perf_counter(), time.process_time()
        if before < self.skip + self.count <= self.done:
            self.ended = time.perf_counter(), time.process_time()
            self.scope.cancel()

    async def watch(self) -> None:
        """Notes how late a timer comes, and how much of that this process got no CPU."""
        while True:
            began, cpu_s = time.perf_counter(), time.process_time()
            await anyio.sleep(TICK_S)
            late_s = time.perf_counter() - began - TICK_S
            if 0 < self.began[0] <= began:
                self.lags.append(late_s)
                self.starved_s += max(0.0, late_s - (time.process_time() - cpu_s) - TICK_S)

    def figures(self) -> dict[str, float]:
        wall_s, cpu_s = (end - begin for begin, end in zip(self.began, self.ended, strict=True))
        lags = sorted(self.lags)
        return {
            "samples": self.count,
            "samples_per_s": self.count / wall_s,
            "cpu_ms_per_sample": 1e3 * cpu_s / self.count,
            "core": cpu_s / wall_s,
            "lag_p50_ms": 1e3 * lags[len(lags) // 2],
            "lag_p99_ms": 1e3 * lags[int(len(lags) * 0.99)],
            "lag_max_ms": 1e3 * lags[-1],
            "starved": self.starved_s / wall_s,
        }


async def measure(name: str, load: Load, skip: int, count: int) -> dict[str, Any]:
    """One client under steady load."""
    settle()
    window = Window(skip, count)
    try:
        async with CLIENTS[name](load) as run, anyio.create_task_group() as tasks:
            tasks.start_soon(window.watch)
            with window.scope:
                await run(window.add, None)
            tasks.cancel_scope.cancel()
    except* httpx.TransportError:  # what httpx makes of being cancelled with hundreds of requests under way
        if not window.ended[0]:
            raise
    return {"client": name, **window.figures()}


@asynccontextmanager
async def noop_engine(cpu: int, latency_s: float = 0.0) -> AsyncIterator[str]:
    """Its url."""
    script = Path(__file__).with_name("noop_engine.py")
    options = ("--cpu", str(cpu), "--latency-s", str(latency_s), "--jitter", str(JITTER), "--tokens", str(TOKENS))
    options += ("--parent", str(os.getpid()))
    async with await anyio.open_process([sys.executable, str(script), *options], stderr=subprocess.DEVNULL) as engine:
        assert engine.stdout is not None
        port = int(await engine.stdout.receive())
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            engine.kill()


def write_prompts(path: Path, count: int, length: int) -> Path:
    records = ({"prompt": (f"{i}+1=" * length)[:length], "answer": "2"} for i in range(count))
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


class Bench:
    """What the parts share."""

    def __init__(self, work: Path, cores: Sequence[int], samples: int, rounds: int, pairs: int) -> None:
        self._work, self._client_cpu, self._engine_cpu = work, cores[0], cores[-1]
        self._samples, self._rounds, self._pairs = samples, rounds, pairs
        self._model = work / "model"
        tokenizer = PolicyTokenizer.load(self._model)
        tokenizer.vocab_size, tokenizer.context_length = VOCABULARY, 2 * (PROMPT + TOKENS)  # as of a larger model
        prompts = write_prompts(work / "noop.jsonl", 4 * GROUPS, PROMPT)
        self._load = Load("", 512, GROUPS, SAMPLES, TOKENS, prompts, tokenizer, work, ahead=1)

    async def noop(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        async with noop_engine(self._engine_cpu) as url:
            load = replace(self._load, url=url)
            for number in range(self._rounds):
                for name in CLIENTS:
                    skip, count = 2 * load.batch, self._samples
                    if name == USUAL:
                        skip, count = HTTPX_SKIP, count // HTTPX_SHARE
                    row = await measure(name, load, min(skip, count), count)
                    rows.append({"round": number, **row})
                    print(f"  noop {number + 1}/{self._rounds} {line(row)}", flush=True)
        return rows

    async def paced(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for latency_s, in_flight, names in PACES:
            offered = in_flight / latency_s
            for name in names:
                ahead = 2 * in_flight // self._load.batch + 1
                async with noop_engine(self._engine_cpu, latency_s) as url:
                    load = replace(self._load, url=url, in_flight=in_flight, ahead=ahead)
                    skip, count = 3 * in_flight, int(20 * offered)
                    if name == USUAL:  # it serves a tenth of what is offered
                        skip, count = HTTPX_SKIP, HTTPX_PACED
                    row = await measure(name, load, skip, count)
                rows.append(
                    {
                        "latency_s": latency_s,
                        "in_flight": in_flight,
                        "served_of_offered": row["samples_per_s"] / offered,
                        **row,
                    }
                )
                print(f"  {latency_s:g} s, {in_flight:5} in flight {line(row)}", flush=True)
        return rows

    @asynccontextmanager
    async def real_engine(self) -> AsyncIterator[dict[str, str]]:
        """Its url and that of the router."""
        run = self._work / "run"
        await anyio.Path(run).mkdir()
        config = Config.model_validate(
            {
                "model": {"path": self._model},
                "run": {"dir": run},
                "engine": {
                    "max_total_tokens": 16384,
                    "max_running_requests": REAL_IN_FLIGHT,
                    "cpus": [self._engine_cpu],
                },
            }
        )
        events = EventLog(run / "events.jsonl")
        async with EngineHost.start(run / "logs") as host, anyio.create_task_group() as tasks:
            controller = InferenceController(
                config,
                hosts={0: host},
                events=events,
                layout=plan_layout(config, Machine()),
                model_path=self._model,
                run_dir=run,
            )
            await controller.start(tasks)
            try:
                await controller.wait_ready()
                lease = await controller.begin_weight_update("0.0")
                (engine,) = lease.engines
                async with controller.open_engine(engine.engine_id, engine.url) as client:
                    await client.update_from_disk(str(self._model))
                ack = UpdateAck(engine.engine_id, engine.generation)
                await controller.commit_weight_update(lease.lease_id, [ack], None)
                yield {"direct": engine.url, "router": controller.router_url}
            finally:
                await controller.dispose()
                events.close()

    async def real(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        prompts = write_prompts(self._work / "real.jsonl", REAL_GROUPS, REAL_PROMPT)
        tokenizer = PolicyTokenizer.load(self._model)
        real = Load("", REAL_IN_FLIGHT, REAL_GROUPS, REAL_SAMPLES, REAL_TOKENS, prompts, tokenizer, self._work)
        async with self.real_engine() as urls, AsyncExitStack() as clients:
            runs: dict[tuple[str, str], Run] = {}
            for way, url in urls.items():
                for name, client in CLIENTS.items():
                    runs[way, name] = await clients.enter_async_context(client(replace(real, url=url)))
            settle()
            for number in range(-1, self._pairs):  # the first fills the prefix cache and opens connections
                order = list(runs) if number % 2 else list(reversed(runs))
                for way, name in order:
                    began = time.perf_counter()
                    await runs[way, name](lambda samples: None, 1)
                    wall_s = time.perf_counter() - began
                    if number >= 0:
                        rows.append({"pair": number, "way": way, "client": name, "wall_s": wall_s})
                    print(f"  {way:7}{number + 1}/{self._pairs} {name:24}{wall_s:8.3f} s", flush=True)
        return rows


def line(row: Mapping[str, Any]) -> str:
    return (
        f"{row['client']:24}{row['samples_per_s']:8.0f}/s{row['cpu_ms_per_sample']:8.3f} ms CPU each"
        f"   core{row['core']:5.0%}   lag p50{row['lag_p50_ms']:7.1f} p99{row['lag_p99_ms']:8.1f} ms"
        f"   starved{row['starved']:5.1%}"
    )


def pair_ratios(rows: Sequence[Mapping[str, Any]], key: str, over: str, under: str) -> list[float]:
    """`over` / `under` of `key`, in each round."""
    numerators, denominators = ([row[key] for row in rows if row["client"] == name] for name in (over, under))
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def upper_95(ratios: Sequence[float]) -> float:
    """Upper one-sided 95 % bound of the geometric mean."""
    logs = [math.log(ratio) for ratio in ratios]
    if len(logs) < 2:
        return math.inf
    degrees = len(logs) - 1
    return math.exp(
        statistics.fmean(logs) + T_95[min(degrees, len(T_95)) - 1] * statistics.stdev(logs) / len(logs) ** 0.5
    )


def judge_noop(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, bool]]:
    print(f"\n{'no-op engine':24}{'samples/s':>10}{'range':>14}{'CPU ms each':>13}{'x bare':>8}{'x httpx':>9}")
    ratios = {}
    for name in CLIENTS:
        mine = [row for row in rows if row["client"] == name]
        rates = [row["samples_per_s"] for row in mine]
        ratios[name] = [statistics.median(pair_ratios(rows, "samples_per_s", name, under)) for under in (BARE, USUAL)]
        print(
            f"{name:24}{statistics.median(rates):10.0f}{f'{min(rates):.0f}-{max(rates):.0f}':>14}"
            f"{statistics.median(row['cpu_ms_per_sample'] for row in mine):13.3f}"
            f"{ratios[name][0]:8.2f}{ratios[name][1]:9.1f}"
        )
    yield f"executor over bare loop {ratios[OURS][0]:.2f} >= {LEAST_OF_BARE}", ratios[OURS][0] >= LEAST_OF_BARE
    yield f"executor over httpx {ratios[OURS][1]:.1f} >= {LEAST_OF_HTTPX:g}", ratios[OURS][1] >= LEAST_OF_HTTPX


def judge_paced(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, bool]]:
    print(
        f"\n{'paced':24}{'latency':>8}{'flight':>8}{'served':>8}{'core':>6}"
        f"{'lag p50':>9}{'p99':>8}{'max ms':>8}{'starved':>9}"
    )
    for row in rows:
        print(
            f"{row['client']:24}{row['latency_s']:7g}s{row['in_flight']:8}{row['served_of_offered']:8.1%}"
            f"{row['core']:6.0%}{row['lag_p50_ms']:9.1f}{row['lag_p99_ms']:8.1f}{row['lag_max_ms']:8.1f}{row['starved']:9.1%}"
        )
        if row["client"] == OURS:
            where = f"executor at {row['in_flight']} in flight"
            served, core, lag_ms = row["served_of_offered"], row["core"], row["lag_p99_ms"]
            yield f"{where}: serves {served:.1%} >= {LEAST_SERVED:.0%}", served >= LEAST_SERVED
            yield f"{where}: loop lag p99 {lag_ms:.1f} ms < {1e3 * MOST_LAG_S:g}", lag_ms < 1e3 * MOST_LAG_S
            yield f"{where}: {core:.0%} of the core <= {MOST_CORE:.0%}", core <= MOST_CORE


def judge_real(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, bool]]:
    print(f"\n{'real engine':20}{'client':24}{'wall s':>8}{'x bare':>8}{'upper 95 %':>12}")
    for way, most in MOST_WALL.items():
        mine = [row for row in rows if row["way"] == way]
        for name in CLIENTS:
            ratios = pair_ratios(mine, "wall_s", name, BARE)
            wall_s = statistics.median(row["wall_s"] for row in mine if row["client"] == name)
            bound = upper_95(ratios)
            print(f"{way:20}{name:24}{wall_s:8.3f}{statistics.geometric_mean(ratios):8.3f}{bound:12.3f}")
            if name == OURS:
                yield f"real engine, {way}: wall over bare loop, upper 95 % bound {bound:.3f} <= {most}", bound <= most


PARTS = {"noop": judge_noop, "paced": judge_paced, "real": judge_real}


async def run_all(parts: Sequence[str], cores: Sequence[int], samples: int, rounds: int, pairs: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        await anyio.to_thread.run_sync(build, Path(directory) / "model")
        bench = Bench(Path(directory), cores, samples, rounds, pairs)
        for part in parts:
            began, load = time.time(), os.getloadavg()[0]
            rows = await getattr(bench, part)()
            results[part] = {
                "measured": time.strftime("%Y-%m-%d", time.gmtime(began)),
                "load_average_before": load,
                "cores": len(cores),
                "rows": [{k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()} for row in rows],
            }
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(PARTS), help="parts to run")
    parser.add_argument("--samples", type=int, default=8192, help="of a no-op row, in one round")
    parser.add_argument("--rounds", type=int, default=7, help="of the no-op rows")
    parser.add_argument("--pairs", type=int, default=9, help="of the rows with the real engine")
    arguments = parser.parse_args()
    parts = arguments.rows.split(",")
    if unknown := set(parts) - PARTS.keys():
        parser.error(f"--rows: there is no {', '.join(sorted(unknown))}; known are {', '.join(PARTS)}")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})
    results = anyio.run(
        run_all,
        parts,
        cores,
        arguments.samples,
        arguments.rounds,
        arguments.pairs,
        backend_options={"use_uvloop": True},
    )
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(known | results, indent=1) + "\n")
    aims = [aim for part in parts for aim in PARTS[part](results[part]["rows"])]
    print()
    for aim, met in aims:
        print(f"{'met   ' if met else 'MISSED'}  {aim}")
    return 0 if all(met for _, met in aims) else 1


if __name__ == "__main__":
    sys.exit(main())
