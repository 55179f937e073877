"""Scorer: one way to score a sample, wherever the reward function runs.

Invariant: `score` always returns a Score, in bounded time from when the function was called; a failure is counted and
says why. Only a worker that cannot start raises (RewardError).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import anyio
from anyio.abc import TaskGroup

from asyncrl.config.rollout import RewardConfig
from asyncrl.data.sample import Prompt, Sample
from asyncrl.errors import RewardError
from asyncrl.observability.waits import waiting
from asyncrl.rollout.rewards.pool import ProcessHost, WorkerPool
from asyncrl.rollout.rewards.registry import RewardFunction, Runs
from asyncrl.rollout.rewards.result import Score, describe_exception, judge_result


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
        else:
            score = await self._await(sample, prompt)
        if score.failure is not None:
            self.failures[score.failure.partition(":")[0][:80]] += 1
        return score

    def _call(self, sample: Sample, prompt: Prompt) -> Score:
        try:
            return judge_result(self._function.call(sample, prompt))
        except Exception as error:  # whatever the function raises is this sample's outcome
            return Score(None, describe_exception(error))

    async def _call_async(self, sample: Sample, prompt: Prompt) -> Score:
        try:
            return judge_result(await self._function.call(sample, prompt))
        except Exception as error:  # as above; the end of the deadline is no Exception and passes
            return Score(None, describe_exception(error))

    async def _await(self, sample: Sample, prompt: Prompt) -> Score:
        """An async function in the loop, or a sync one in a thread (no workers; a hanging one keeps its thread)."""
        try:
            with waiting("reward", f"{self._function.name} for {sample.sample_id}", self._timeout_s):
                if self._function.runs is Runs.LOOP:
                    return await self._call_async(sample, prompt)
                return await anyio.to_thread.run_sync(self._call, sample, prompt, abandon_on_cancel=True)
        except TimeoutError:
            return Score(None, f"the reward took longer than {self._timeout_s:g} s and was ended")
