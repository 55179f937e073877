"""An executor in memory, with the contract of the real one and nothing behind it.

A loop can be run against it in milliseconds. It keeps the real one's ledger, so that what is refused there is refused
here; samples are made up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path

import numpy as np

from asyncrl.data.batch import RolloutBatch
from asyncrl.data.sample import Prompt, Sample, SampleGroup, Turn, VersionSpan
from asyncrl.errors import RolloutError
from asyncrl.rollout.evaluation import EvalReport, skipped_report
from asyncrl.rollout.scheduling.deliveries import TRAINER, Deliveries
from asyncrl.rollout.scheduling.group import Group, Issue
from asyncrl.rollout.scheduling.ledger import Ledger, Reached


class FakeExecutor:
    """A RolloutExecutor that makes its samples up; rewards alternate within each group."""

    name = ""

    def __init__(
        self,
        *,
        prompts_per_step: int = 2,
        samples_per_prompt: int = 4,
        tokens: int = 3,
        trainers: tuple[str, ...] = (TRAINER,),
    ) -> None:
        self.version = ""
        self._prompts_per_step = prompts_per_step
        self._samples_per_prompt = samples_per_prompt
        self._tokens = tokens
        self._ledger = Ledger(lambda event: None)
        self._deliveries = Deliveries(trainers)
        self._shared: dict[int, RolloutBatch] = {}
        self._groups = 0
        self._disposed = False

    async def get(self, rollout_id: int, trainer: str = TRAINER) -> RolloutBatch:
        if self._disposed:
            raise RolloutError(f"rollout {rollout_id} is being gathered already, or the executor was disposed")
        self._deliveries.check_deliverable(rollout_id, trainer)
        if rollout_id in self._shared:
            self._deliveries.share(rollout_id, trainer)
            return self._shared[rollout_id]
        groups = [self._finished() for _ in range(self._prompts_per_step)]
        samples = [group.result for group in groups if group.result is not None]
        self._ledger.deliver(rollout_id, groups)
        self._deliveries.deliver(rollout_id, groups, trainer)
        self._shared[rollout_id] = RolloutBatch.from_groups(rollout_id, samples, temperature=1.0)
        return self._shared[rollout_id]

    async def commit(self, rollout_id: int, trainer: str = TRAINER) -> None:
        groups = self._deliveries.commit(rollout_id, trainer)
        if groups is not None:
            self._ledger.train(rollout_id, groups)

    async def save(self) -> dict[str, bytes]:
        self._deliveries.check_all_committed()
        return {"fake.json": str(self._groups).encode()}

    async def restore(
        self, files: Mapping[str, bytes], step: int, on_reached: Callable[[Reached], Awaitable[object]] | None = None
    ) -> Reached:
        self._groups = int(files["fake.json"])
        reached = Reached(self._groups, {})
        if on_reached is not None:
            await on_reached(reached)
        return reached

    async def eval(self, rollout_id: int, hf_dir: Path | None = None) -> EvalReport:
        return self.report_eval_skip(rollout_id, "a fake has nothing to evaluate")

    def report_eval_skip(self, rollout_id: int, reason: str) -> EvalReport:
        return skipped_report(rollout_id, reason)

    def generate_ahead(self, first: int, num_rollouts: int) -> None:
        """What it makes up is there at once."""

    def updating(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def engines_paused(self) -> None:
        """There are no deadlines here."""

    def engines_resumed(self) -> None: ...

    def set_weight_version(self, version: str) -> None:
        self.version = version

    def counts(self) -> Counter[str]:
        """Groups by the state in which they ended or stand."""
        return Counter({state.value: number for state, number in self._ledger.counts().items()})

    async def dispose(self) -> None:
        if not self._disposed:
            self._disposed = True
            self._ledger.drop_delivered("the job ended before they were trained")

    def _finished(self) -> Group:
        group_id = f"{self._groups:08d}"
        prompt_ids = np.arange(1, 4, dtype=np.int32)
        prompt = Prompt(prompt_id=group_id, text="", token_ids=prompt_ids)
        group = self._ledger.admit(Issue(self._groups, prompt, epoch=0))
        self._groups += 1
        self._ledger.start(group, deadline=0)
        turn = Turn(
            prompt_ids,
            np.full(self._tokens, 5, np.int32),
            np.full(self._tokens, -1.0, np.float32),
            (VersionSpan(self.version, 0, self._tokens),),
        )
        samples = tuple(
            Sample.of_turn(
                f"{group_id}.{index:03d}", group_id, turn, finish_reason="length", text="", reward=float(index % 2)
            )
            for index in range(self._samples_per_prompt)
        )
        self._ledger.finish(group, SampleGroup(group_id, prompt, samples), deadline=0)
        return group
