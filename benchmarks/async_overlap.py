"""How well generation and training overlap: the real executor between a scripted engine and a scripted trainer.

    python benchmarks/async_overlap.py [--step-s 5] [--steps 12]

The engine answers over HTTP after a time in proportion to the length of the response (log-normal, sigma 0.8). It serves
64 requests at once; a batch is 32 groups of 8. T_gen is the time that a batch takes alone, as in the synchronous loop.
The trainer takes as long (T_train = mean T_gen). An update of the weights stops the engine for 2 % of that. The
benchmark compares the synchronous loop (max_staleness 0) with generation ahead (1 and 3), each with two kinds of
lengths:

- *same*: all batches have the same response lengths in the same order, so T_gen is constant.
- *drawn*: lengths are drawn independently. T_gen then varies much, because the longest of 256 responses takes most of
  it. A loop that waits for each batch pays the mean of the larger of two times, not the larger of their means.

`over max` is the wall time over the sum of max(T_gen, T_train) of the same batches. `over mean` is the wall time over
the larger of the means. Every batch is checked against its staleness bound. `starved` is the share of time in which
this process had work and got no CPU (it uses a tenth of a core). On a shared machine that also makes the trainer wait.

Prints a table and writes benchmarks/results/async_overlap.json.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import anyio
import anyio.to_thread
import msgspec
from aiohttp import web

from asyncrl.config import Config
from asyncrl.data.staleness import Bound
from asyncrl.data.tokenizer import PolicyTokenizer
from asyncrl.demo.model import build
from asyncrl.observability.events import EventLog
from asyncrl.rollout.executor import RolloutExecutor

ROOT = Path(__file__).parents[1]
GROUPS, SAMPLES, SLOTS, SIGMA, UPDATE = 32, 8, 64, 0.8, 0.02
MODES = (0, 1, 3)
FILL = max(MODES) + 1
"""Number of first steps that do not count, because the pipeline fills during them."""
TOKENS = 32
"""Tokens of every answer. Here the length of a response only decides how long it takes."""
MOST_OVER_MAX, LEAST_RATIO, MOST_IDLE = 1.05, 1.8, 0.05
"""Aims: wall time per step over max(T_gen, T_train) at staleness 1; synchronous over asynchronous time at 1; the
trainer's share of waiting at 3."""

TICK_S = 0.01

Draw = Literal["same", "drawn"]


class Lengths:
    """Relative lengths of responses, with mean 1, by group and sample."""

    def __init__(self, draw: Draw, seed: int = 0) -> None:
        self._draw, self._seed = draw, seed
        self._batches: dict[int, list[float]] = {}

    def of(self, group: int, sample: int) -> float:
        batch, place = divmod(group, GROUPS)
        if batch not in self._batches:
            dice = random.Random(self._seed * 100_003 + (0 if self._draw == "same" else batch))
            mean = math.exp(SIGMA**2 / 2)
            self._batches[batch] = [dice.lognormvariate(0, SIGMA) / mean for _ in range(GROUPS * SAMPLES)]
        return self._batches[batch][place * SAMPLES + sample]


class Engine:
    """Serves /generate. A response of length 1 takes `unit_s`, without the time of updates."""

    def __init__(self, lengths: Lengths, unit_s: float) -> None:
        self.version = "0.0"
        self.busy_s = 0.0
        """Slot-seconds of work done so far."""
        self._lengths, self._unit_s = lengths, unit_s
        self._slots = anyio.Semaphore(SLOTS, fast_acquire=True)
        self._paused = anyio.Event()
        self._resumed = anyio.Event()
        self._resumed.set()

    @asynccontextmanager
    async def update(self, version: str) -> AsyncIterator[None]:
        """Stops generation during the body, as a pause with `retract` does; then goes on with the new version."""
        self._resumed = anyio.Event()
        self._paused.set()
        yield
        self.version = version
        self._paused = anyio.Event()
        self._resumed.set()

    async def generate(self, http: web.Request) -> web.Response:
        request = msgspec.json.decode(await http.read())
        group, sample, _ = request["rid"].split("-", 1)[1].split(".")
        needed_s = self._lengths.of(int(group), int(sample)) * self._unit_s
        done_s, spans = 0.0, []
        async with self._slots:
            while done_s < needed_s:
                await self._resumed.wait()
                began, version, start = anyio.current_time(), self.version, int(TOKENS * done_s / needed_s)
                with anyio.move_on_after(needed_s - done_s) as timer:
                    await self._paused.wait()
                done_s = needed_s if timer.cancelled_caught else done_s + anyio.current_time() - began
                if (end := min(TOKENS, int(TOKENS * done_s / needed_s))) > start:
                    spans.append({"version": version, "start": start, "end": end})
        self.busy_s += needed_s
        meta = {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-0.5, 5, None]] * TOKENS,
            "weight_versions": spans,
        }
        body = msgspec.json.encode({"text": "x", "output_ids": [5] * TOKENS, "meta_info": meta})
        return web.Response(body=body, content_type="application/json")


class Starvation:
    """Counts the seconds by which a timer is late although the process does nothing in that time."""

    def __init__(self) -> None:
        self.seconds = 0.0

    async def watch(self) -> None:
        while True:
            began, cpu_s = time.monotonic(), time.process_time()
            await anyio.sleep(TICK_S)
            idle_s = time.monotonic() - began - TICK_S - (time.process_time() - cpu_s)
            self.seconds += max(0.0, idle_s - TICK_S)


class Bench:
    """The parts that all runs share."""

    def __init__(self, model: Path, prompts: Path, unit_s: float, starvation: Starvation) -> None:
        self._starvation = starvation
        self._model, self._prompts, self._unit_s = model, prompts, unit_s
        self._tokenizer = PolicyTokenizer.load(model)

    @asynccontextmanager
    async def executor(self, draw: Draw, max_staleness: int) -> AsyncIterator[tuple[Engine, RolloutExecutor, Bound]]:
        """Starts an engine, and an executor in front of it."""
        engine = Engine(Lengths(draw), self._unit_s)
        app = web.Application()
        app.router.add_post("/generate", engine.generate)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
        await site.start()
        config = Config.model_validate(
            {
                "model": {"path": self._model},
                "data": {"source": str(self._prompts), "chat_template": False},
                "reward": {"function": "length", "args": {"target": 8}, "workers": 0},
                "rollout": {
                    "prompts_per_step": GROUPS,
                    "samples_per_prompt": SAMPLES,
                    "max_new_tokens": TOKENS,
                    "concurrency": SLOTS,
                    "max_staleness": max_staleness,
                },
            }
        )
        try:
            async with anyio.create_task_group() as tasks:
                executor = RolloutExecutor(
                    config,
                    router_url=f"http://127.0.0.1:{runner.addresses[0][1]}",
                    host=None,
                    events=EventLog(None),
                    tokenizer=self._tokenizer,
                    log_dir=self._model,
                )
                await executor.start(tasks)
                yield engine, executor, Bound.of(config)
                await executor.dispose()
        finally:
            await runner.cleanup()

    async def alone(self, draw: Draw, batches: int) -> list[float]:
        """Returns the seconds to generate each of the first batches, with no training meanwhile."""
        async with self.executor(draw, 0) as (engine, executor, _):
            times = []
            for step in range(batches):
                engine.version = f"0.{step}"
                executor.set_weight_version(engine.version)
                await executor.get(step)
                times.append(executor.last_rollout.seconds)
                await executor.commit(step)
            return times

    async def loop(self, draw: Draw, max_staleness: int, t_gen: Sequence[float]) -> dict[str, Any]:
        """Takes steps as train.py or train_async.py do, one for each batch in `t_gen` (its seconds alone)."""
        t_train = statistics.fmean(t_gen)
        update_s = UPDATE * t_train
        waits: list[float] = []
        staleness: list[tuple[float, int]] = []
        async with self.executor(draw, max_staleness) as (engine, executor, bound):
            executor.set_weight_version(engine.version)
            if max_staleness:
                executor.generate_ahead(0, len(t_gen) + max_staleness)  # as if more steps followed
            began = busy_s = starved_s = 0.0
            for step in range(len(t_gen)):
                if step == FILL:
                    began, busy_s, starved_s = anyio.current_time(), engine.busy_s, self._starvation.seconds
                bound.check(await executor.get(step))
                waits.append(executor.last_rollout.seconds)
                staleness.append((executor.last_rollout.staleness_mean, executor.last_rollout.staleness_max))
                await anyio.sleep(t_train)
                await executor.commit(step)
                async with executor.updating(), engine.update(f"0.{step + 1}"):
                    await anyio.sleep(update_s)
                executor.set_weight_version(engine.version)
            wall_s = anyio.current_time() - began
            busy_s, starved_s = engine.busy_s - busy_s, self._starvation.seconds - starved_s
        counted = t_gen[FILL:]
        return {
            "lengths": draw,
            "max_staleness": max_staleness,
            "steps": len(counted),
            "t_gen_mean_s": statistics.fmean(counted),
            "t_gen_s": [round(seconds, 3) for seconds in counted],
            "t_train_s": t_train,
            "wall_per_step_s": wall_s / len(counted),
            "over_max": wall_s / sum(max(seconds, t_train) for seconds in counted),
            "over_mean": wall_s / len(counted) / max(statistics.fmean(counted), t_train),
            "trainer_waits": sum(waits[FILL:]) / wall_s,
            "trainer_updates": len(counted) * update_s / wall_s,
            "starved": starved_s / wall_s,
            "engine_busy": busy_s / wall_s / SLOTS,
            "staleness_mean": statistics.fmean(mean for mean, _ in staleness[FILL:]),
            "staleness_max": max(most for _, most in staleness[FILL:]),
        }


async def run_all(step_s: float, steps: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        work = Path(directory)
        await anyio.to_thread.run_sync(build, work / "model")
        prompts = anyio.Path(work / "prompts.jsonl")
        await prompts.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": "2"}) + "\n" for i in range(4096)))
        async with anyio.create_task_group() as tasks:
            starvation = Starvation()
            tasks.start_soon(starvation.watch)
            # Each slot serves four responses of mean length, and the longest response takes about seven mean lengths.
            bench = Bench(work / "model", Path(prompts), step_s / 9, starvation)
            for draw in get_args(Draw):
                t_gen = await bench.alone(draw, FILL + steps)
                sync_s = 0.0
                for max_staleness in MODES:
                    row = await bench.loop(draw, max_staleness, t_gen)
                    sync_s = sync_s or row["wall_per_step_s"]
                    rows.append(row | {"ratio_to_sync": sync_s / row["wall_per_step_s"]})
                    show(rows[-1])
            tasks.cancel_scope.cancel()
    return rows


HEADER = (
    f"{'lengths':8}{'staleness':>10}{'s/step':>9}{'over max':>10}{'over mean':>11}{'sync/it':>9}{'waits':>8}"
    f"{'updates':>9}{'engine':>8}{'starved':>9}{'T_gen s':>9}{'stale':>7}"
)


def show(row: Mapping[str, Any]) -> None:
    """Prints one row of the table."""
    print(
        f"{row['lengths']:8}{row['max_staleness']:10}{row['wall_per_step_s']:9.3f}{row['over_max']:10.3f}"
        f"{row['over_mean']:11.3f}{row['ratio_to_sync']:9.2f}{row['trainer_waits']:8.1%}{row['trainer_updates']:9.1%}"
        f"{row['engine_busy']:8.1%}{row['starved']:9.1%}{row['t_gen_mean_s']:9.3f}{row['staleness_mean']:7.2f}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-s", type=float, default=5.0, help="about how long a batch takes the engine")
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    print(HEADER)
    rows = anyio.run(run_all, arguments.step_s, arguments.steps, backend_options={"use_uvloop": True})
    same = {row["max_staleness"]: row for row in rows if row["lengths"] == "same"}
    aims = {
        f"1: wall per step over max(T_gen, T_train) <= {MOST_OVER_MAX}": same[1]["over_max"] <= MOST_OVER_MAX,
        f"1: synchronous over asynchronous >= {LEAST_RATIO}": same[1]["ratio_to_sync"] >= LEAST_RATIO,
        f"3: the trainer waits <= {MOST_IDLE:.0%} of the time": same[3]["trainer_waits"] <= MOST_IDLE,
    }
    for aim, met in aims.items():
        print(f"{'met   ' if met else 'MISSED'}  {aim}")
    path = ROOT / "benchmarks" / "results" / "async_overlap.json"
    path.write_text(json.dumps({"groups": GROUPS, "samples": SAMPLES, "slots": SLOTS, "rows": rows}, indent=1) + "\n")
    return 0 if all(aims.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
