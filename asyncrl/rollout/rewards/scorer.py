"""Scorer: one way to score samples, wherever the reward function runs.

Invariants
- A call returns a Score for each sample, in bounded time from when the function was called; a fault is counted and says
  why. Only a worker that cannot start raises (RewardError), and a cancellation of the caller goes on.
- Without workers a sync function runs in a thread, which cannot be ended. At most `_SLOTS` calls are waited for; the
  others queue, and their clocks stand. A call that outlasts its deadline gives its slot back and keeps its thread.
  While `_MOST_RUNNING` calls run, abandoned ones with them, further calls fail at once and say why.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from asyncrl.config.sections.rollout import RewardConfig
from asyncrl.data.sample import Prompt, Sample
from asyncrl.errors import RewardError, describe_exception
from asyncrl.observability.waits import waiting
from asyncrl.rollout.rewards.pool import ProcessHost, WorkerPool
from asyncrl.rollout.rewards.registry import RewardFunction, Runs
from asyncrl.rollout.rewards.result import Score, failed, is_fault

_SLOTS = 40  # threads, as many as anyio's own limit, which is left to the file work of others
_MOST_RUNNING = 2 * _SLOTS  # as many calls abandoned as are waited for: the function hangs as a rule

Scores = tuple[Score, ...]


class LatencyMeter:
    """How long calls of the reward took between two deliveries."""

    def __init__(self) -> None:
        """No call has ended."""
        self._seconds: list[float] = []

    def add(self, seconds: float) -> None:
        """A call has ended."""
        self._seconds.append(seconds)

    def take(self) -> dict[str, float]:
        """Figures by name (of `RolloutMetrics`) over the calls since the last `take`; empty where there were none."""
        taken, self._seconds = self._seconds, []
        return {"reward_s_mean": sum(taken) / len(taken), "reward_s_max": max(taken)} if taken else {}


class Scorer:
    """Scores samples with the configured function."""

    def __init__(
        self, function: RewardFunction, config: RewardConfig, *, host: ProcessHost | None, log_dir: Path, name: str = ""
    ) -> None:
        """The names of its processes begin with `name`.

        Raises RewardError when `function` needs a worker and there is no `host` to run it.
        """
        self._function = function
        self._timeout_s = config.timeout_s
        self.failures: Counter[str] = Counter()
        """How often each fault happened to a sample, by its first words."""
        self.latency = LatencyMeter()
        self._slots = anyio.CapacityLimiter(_SLOTS)
        self._threads = anyio.CapacityLimiter(math.inf)  # a call that has a slot has a thread at once
        self._running: set[object] = set()
        """One mark per call that runs in a thread; the thread itself sets and removes it."""
        self._pool: WorkerPool | None = None
        if function.runs is Runs.WORKER and config.workers > 0:
            if host is None:
                raise RewardError(
                    f"reward.workers = {config.workers} needs a process host; "
                    f"set reward.workers = 0 to run {function.name} in this process"
                )
            self._pool = WorkerPool(
                host, function, size=config.workers, timeout_s=config.timeout_s, log_dir=log_dir, name=name
            )

    @property
    def by_group(self) -> bool:
        """Whether one call scores all samples of a group, instead of one sample."""
        return self._function.scope == "group"

    async def start(self, task_group: TaskGroup) -> None:
        """Starts the workers, where there are any; they live in `task_group` until `aclose`."""
        if self._pool is not None:
            await self._pool.start(task_group)

    async def aclose(self) -> None:
        """Ends the workers; a call in progress fails. Idempotent."""
        if self._pool is not None:
            await self._pool.aclose()

    async def score(self, sample: Sample, prompt: Prompt) -> Score:
        """The score of one sample, from a call of its own."""
        [score] = await self.score_together((sample,), prompt)
        return score

    async def score_together(self, samples: Sequence[Sample], prompt: Prompt) -> Scores:
        """The scores of the samples of one call, in order; more than one only where the reward scores groups."""
        began = time.monotonic()
        if self._pool is not None:
            scores = await self._pool.score(samples, prompt)
        elif self._function.runs is Runs.INLINE:
            scores = self._call(samples, prompt)
        elif self._function.runs is Runs.LOOP:
            scores = await self._in_time(self._call_async, samples, prompt)
        else:
            async with self._slots:
                scores = await self._in_time(self._call_in_thread, samples, prompt)
        self.latency.add(time.monotonic() - began)
        for score in scores:
            if score.failure is not None and is_fault(score.failure):
                self.failures[score.failure.partition(":")[0][:80]] += 1
        return scores

    async def _in_time(
        self, call: Callable[[Sequence[Sample], Prompt], Awaitable[Scores]], samples: Sequence[Sample], prompt: Prompt
    ) -> Scores:
        try:
            with waiting("reward", f"{self._function.name} for {self._function.subject(samples)}", self._timeout_s):
                return await call(samples, prompt)
        except TimeoutError:
            return failed(len(samples), f"the reward took longer than {self._timeout_s:g} s and was ended")

    def _call(self, samples: Sequence[Sample], prompt: Prompt) -> Scores:
        try:
            return self._function.judge(self._function(samples, prompt), len(samples))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever the function raises, sys.exit() too, is the outcome of these samples
            return failed(len(samples), describe_exception(error))

    async def _call_async(self, samples: Sequence[Sample], prompt: Prompt) -> Scores:
        try:
            return self._function.judge(await self._function(samples, prompt), len(samples))
        except anyio.get_cancelled_exc_class():
            await anyio.lowlevel.checkpoint_if_cancelled()  # raises when this call itself is cancelled, or out of time
            return failed(len(samples), "the reward function awaited something that was cancelled")
        except (Exception, SystemExit) as error:  # as above
            return failed(len(samples), describe_exception(error))

    async def _call_in_thread(self, samples: Sequence[Sample], prompt: Prompt) -> Scores:
        if len(self._running) >= _MOST_RUNNING:
            failure = f"{_MOST_RUNNING} calls of the reward hang: set reward.workers, whose processes can be ended"
            return failed(len(samples), failure)
        return await anyio.to_thread.run_sync(
            self._call_marked, samples, prompt, abandon_on_cancel=True, limiter=self._threads
        )

    def _call_marked(self, samples: Sequence[Sample], prompt: Prompt) -> Scores:
        mark = object()
        self._running.add(mark)
        try:
            return self._call(samples, prompt)
        finally:
            self._running.discard(mark)
