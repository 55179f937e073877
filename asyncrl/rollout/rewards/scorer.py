"""Scorer: one way to score a sample, wherever the reward function runs.

Invariants
- `score` always returns a Score, in bounded time from when the function was called; a failure is counted and says why.
  Only a worker that cannot start raises (RewardError), and a cancellation of the caller goes on.
- Without workers a sync function runs in a thread, which cannot be ended. At most `_SLOTS` calls are waited for; the
  others queue, and their clocks stand. A call that outlasts its deadline gives its slot back and keeps its thread.
  While `_MOST_RUNNING` calls run, abandoned ones with them, further samples fail at once and say why.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from asyncrl.config.sections.rollout import RewardConfig
from asyncrl.data.sample import Prompt, Sample
from asyncrl.errors import RewardError
from asyncrl.observability.waits import waiting
from asyncrl.rollout.rewards.pool import ProcessHost, WorkerPool
from asyncrl.rollout.rewards.registry import RewardFunction, Runs
from asyncrl.rollout.rewards.result import Score, describe_exception, judge_result

_SLOTS = 40  # threads, as many as anyio's own limit, which is left to the file work of others
_MOST_RUNNING = 2 * _SLOTS  # as many calls abandoned as are waited for: the function hangs as a rule


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
        """How often each failure happened, by its first words."""
        self._slots = anyio.CapacityLimiter(_SLOTS)
        self._threads = anyio.CapacityLimiter(math.inf)  # who has a slot has a thread at once
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
    def immediate(self) -> bool:
        """Whether `score` returns without waiting for anything."""
        return self._function.runs is Runs.INLINE

    async def start(self, task_group: TaskGroup) -> None:
        """Starts the workers, where there are any; they live in `task_group` until `aclose`."""
        if self._pool is not None:
            await self._pool.start(task_group)

    async def aclose(self) -> None:
        if self._pool is not None:
            await self._pool.aclose()

    async def score(self, sample: Sample, prompt: Prompt) -> Score:
        if self._pool is not None:
            score = await self._pool.score(sample, prompt)
        elif self._function.runs is Runs.INLINE:
            score = self._call(sample, prompt)
        elif self._function.runs is Runs.LOOP:
            score = await self._in_time(self._call_async, sample, prompt)
        else:
            async with self._slots:
                score = await self._in_time(self._call_in_thread, sample, prompt)
        if score.failure is not None:
            self.failures[score.failure.partition(":")[0][:80]] += 1
        return score

    async def _in_time(
        self, call: Callable[[Sample, Prompt], Awaitable[Score]], sample: Sample, prompt: Prompt
    ) -> Score:
        try:
            with waiting("reward", f"{self._function.name} for {sample.sample_id}", self._timeout_s):
                return await call(sample, prompt)
        except TimeoutError:
            return Score(None, f"the reward took longer than {self._timeout_s:g} s and was ended")

    def _call(self, sample: Sample, prompt: Prompt) -> Score:
        try:
            return judge_result(self._function.call(sample, prompt))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever the function raises, sys.exit() too, is this sample's outcome
            return Score(None, describe_exception(error))

    async def _call_async(self, sample: Sample, prompt: Prompt) -> Score:
        try:
            return judge_result(await self._function.call(sample, prompt))
        except anyio.get_cancelled_exc_class():
            await anyio.lowlevel.checkpoint_if_cancelled()  # raises when it is we who are cancelled, or out of time
            return Score(None, "the reward function awaited something that was cancelled")
        except (Exception, SystemExit) as error:  # as above
            return Score(None, describe_exception(error))

    async def _call_in_thread(self, sample: Sample, prompt: Prompt) -> Score:
        if len(self._running) >= _MOST_RUNNING:
            return Score(
                None, f"{_MOST_RUNNING} calls of the reward hang: set reward.workers, whose processes can be ended"
            )
        return await anyio.to_thread.run_sync(
            self._call_marked, sample, prompt, abandon_on_cancel=True, limiter=self._threads
        )

    def _call_marked(self, sample: Sample, prompt: Prompt) -> Score:
        mark = object()
        self._running.add(mark)
        try:
            return self._call(sample, prompt)
        finally:
            self._running.discard(mark)
