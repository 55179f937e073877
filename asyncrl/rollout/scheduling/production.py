"""Production: turns prompts into finished groups, as far ahead of the trainer as admission allows.

    prompt ──► admit ──► task of the group: generate, score ──► filters ──► finished ──► take: a batch
              (admission.py)                                  (filters.py)             (admission.py)

`admission.py` decides which group may begin and which groups make up a batch; `ledger.py` changes the records. This is
the shell around them: one task for each group, and the wait for the next batch. A group is admitted only when it may
get a slot of the engines soon, so tasks and memory follow the groups that run, not the groups that might run.

Invariants
- Every admitted group ends once, in a batch or with a reason; `aclose` drops the groups that are left.
- A `take` that is cancelled loses nothing: its groups stay for the next one.
- A failure that ends the run stops all generation. The `take` in progress raises it, or else the next one.
- Every wait can be cancelled, also while groups end in each turn of the event loop.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import anyio
import anyio.abc

from asyncrl.data.prompt_stream import PromptStream
from asyncrl.data.sample import Sample, SampleGroup
from asyncrl.data.staleness import oldest_step, step_of
from asyncrl.errors import AsyncRLError, RolloutError
from asyncrl.observability.waits import WAITS
from asyncrl.rollout.scheduling.admission import Admission, Batch, Limits
from asyncrl.rollout.scheduling.collection import Collection, FirstBatchCheck, drop_reason, first_failure
from asyncrl.rollout.scheduling.filters import Filters
from asyncrl.rollout.scheduling.group import Group, GroupState, Issue
from asyncrl.rollout.scheduling.ledger import Ledger
from asyncrl.tasks import Changes

_CLOSE_TIMEOUT_S = 5.0

Generate = Callable[[Issue, Callable[[], None]], Awaitable[SampleGroup]]
"""Samples and scores a group; calls its second argument when the first request is under way."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The result of one `take`."""

    groups: tuple[Group, ...]
    """The records of the batch, earliest deadline first."""
    samples: tuple[SampleGroup, ...]
    """Their results, in the same order."""
    collection: Collection
    """What else became of groups since the batch before."""
    ready: int
    """Finished groups that wait for later batches."""


class Production:
    """Start `serve`, then `take` a batch for each step."""

    def __init__(
        self,
        limits: Limits,
        *,
        stream: PromptStream,
        generate: Generate,
        filters: Filters,
        min_usable: int,
        first_batch: FirstBatchCheck,
        ledger: Ledger,
        waiting: int = 2,
    ) -> None:
        """A group with fewer than `min_usable` usable samples is dropped. `first_batch` may end the run.

        At most `waiting` groups are admitted before they have a slot: as many as may find one in the same turn of the
        loop, which is a long turn under load. A group that waits costs memory only: its deadline moves with the
        weights.
        """
        self._batch = limits.batch
        self._waiting = waiting
        self._stream = stream
        self._generate = generate
        self._filters = filters
        self._min_usable = min_usable
        self._first_batch = first_batch
        self._ledger = ledger
        self._admission = Admission(limits, ledger)
        self._again: deque[Issue] = deque()
        """Prompts to be issued again, before new ones are drawn."""
        self._failure: AsyncRLError | None = None
        self._taking = False
        self._serving = False
        self._closed = False
        self._ended = anyio.Event()
        self._changes = Changes()
        self._collection = Collection.of_batch(limits.batch)

    async def serve(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Admits groups and runs their tasks until `aclose`."""
        self._serving = True
        try:
            async with anyio.create_task_group() as tasks:
                task_status.started()
                while not self._closed:
                    if self._may_admit:
                        group = self._ledger.admit(self._next_issue())
                        tasks.start_soon(self._run, group, name=f"group {group.group_id}")
                    else:
                        await self._changes.wait()
                tasks.cancel_scope.cancel()
        finally:
            self._ended.set()

    async def aclose(self) -> None:
        """Ends generation; groups that no batch took are dropped. Idempotent."""
        self._closed = True
        self._changes.notify()
        if self._serving:
            with anyio.move_on_after(_CLOSE_TIMEOUT_S, shield=True):
                await self._ended.wait()
        self._drop_undelivered()

    def run_ahead(self, first: int, horizon: int) -> None:
        """Begins to generate for the batches [first, horizon), as far ahead as the weights allow."""
        self._admission.begin(first)
        self._admission.extend(horizon)
        self._changes.notify()

    def publish(self, step: int | None) -> None:
        """The engines hold weights of `step`; None for weights of no known step, which change nothing here."""
        if step is not None:
            self._admission.publish(step)
            self._changes.notify()

    async def take(self, step: int) -> Taken:
        """The groups of the batch of `step`, in the order of their deadlines; steps follow one another.

        Raises RolloutError out of order, for weights that are too old for the batch, when too many groups failed or
        were filtered, and on `aclose`; and whatever else made generation fail.
        """
        if self._taking or self._closed:
            raise RolloutError(f"rollout {step} is being gathered already, or the executor was disposed")
        self._admission.begin(step)
        if step != self._admission.step:
            raise RolloutError(f"rollout {step} was asked for out of order; the next one is {self._admission.step}")
        self._taking = True
        try:
            return self._hand_over(await self._next_batch())
        finally:
            self._taking = False

    def scored(self, sample: Sample) -> None:
        """A sample was scored, or its reward failed: too many failures in the first batch end the run."""
        if (error := self._first_batch.observe(sample)) is not None:
            self.fail(error)

    def fail(self, error: AsyncRLError) -> None:
        """Stops generation; the `take` in progress, or the next one, raises `error`."""
        if self._failure is None:
            self._failure = error
            self._drop_undelivered()
            self._changes.notify()

    def save(self) -> tuple[tuple[tuple[Issue, SampleGroup], ...], tuple[Issue, ...]]:
        """Groups that wait for a batch, and prompts to issue again if the process ends now.

        A group that is delivered counts as not trained, so no batch may be open. Raises what made generation fail,
        since its groups are dropped already.
        """
        if self._failure is not None:
            raise self._failure
        undelivered = self._ledger.undelivered()
        finished = tuple((group.issue, group.result) for group in undelivered if group.result is not None)
        unfinished = (group.issue for group in undelivered if group.state is not GroupState.FINISHED)
        taken_back = (group.issue for group in self._ledger.groups(GroupState.DELIVERED))
        return finished, (*taken_back, *unfinished, *self._again)

    def restore(self, step: int, finished: Sequence[tuple[Issue, SampleGroup]], again: Sequence[Issue]) -> None:
        """Goes on before the batch of `step` with what `save` returned; before anything else.

        Finished groups that no batch may train are issued again: made by weights that came after `step`, or too old,
        or more than the batches take, where these became smaller.
        """
        self._admission.begin(step)
        deadlines = []
        for _, group in finished:
            spans = [span for sample in group.samples if sample.reward is not None for span in sample.versions]
            ahead = any((made := step_of(span.version)) is not None and made > step for span in spans)
            deadlines.append(step - 1 if ahead else self._admission.restored_deadline(oldest_step(spans)))
        placed = self._admission.with_place(deadlines)
        self._ledger.restore((*finished[index], deadlines[index]) for index in sorted(placed))
        self._again.extend(issue for index, (issue, _) in enumerate(finished) if index not in placed)
        self._again.extend(again)

    # groups

    @property
    def _may_admit(self) -> bool:
        """Whether a group may be admitted now: the rule has room, and not enough groups wait for a slot."""
        waiting = len(self._ledger.groups(GroupState.ADMITTED))
        return self._failure is None and waiting < self._waiting and self._admission.room > 0

    def _next_issue(self) -> Issue:
        if self._again:
            return self._again.popleft()
        draw = self._stream.draw()
        return Issue.of(draw)

    async def _run(self, group: Group) -> None:
        """The task of one group."""
        if group.ended:  # dropped before this task had its first turn
            return
        with anyio.CancelScope() as group.scope:
            try:
                result = await self._generate(group.issue, lambda: self._started(group))
                if not group.ended:  # else it was dropped just before its last sample came
                    self._made(group, result)
            except AsyncRLError as error:
                self.fail(error)
        group.scope = None

    def _started(self, group: Group) -> None:
        if not group.ended:
            self._ledger.start(group, self._admission.newest_deadline)
            self._changes.notify()

    def _made(self, group: Group, result: SampleGroup) -> None:
        """A group is there: it waits for a batch now, or leaves with a reason and frees its place."""
        reason = drop_reason(result, self._min_usable)
        if reason is None:
            error = self._judge(group, result)
        else:
            self._drop(group, reason)
            error = self._collection.drop(reason, first_failure(result))
        if error is not None:
            self.fail(error)
        self._changes.notify()

    def _judge(self, group: Group, result: SampleGroup) -> RolloutError | None:
        """Finishes a group with enough usable samples; returns an error when too many groups cannot be trained."""
        oldest = oldest_step(span for sample in result.samples if sample.reward is not None for span in sample.versions)
        deadline, step = self._admission.deadline(group, oldest), self._admission.step
        self._ledger.finish(group, result, deadline)
        objection = self._filters.objection(result)
        if objection is not None:
            self._ledger.filter(group, objection)
            return self._collection.filter(objection)
        if deadline >= step:
            return None
        reason = "made by weights that are too old for every batch to come"
        self._drop(group, reason)
        self._issue_again(group)
        return self._collection.drop(reason, f"group {group.group_id}, weights of step {oldest}, batch {step}")

    def _drop(self, group: Group, reason: str) -> None:
        """Drops a group, frees its place and ends its task."""
        self._ledger.drop(group, reason)
        if group.scope is not None:
            group.scope.cancel()

    def _drop_undelivered(self) -> None:
        for group in self._ledger.undelivered():
            self._drop(group, "its rollout was not delivered")

    def _issue_again(self, group: Group) -> None:
        self._collection.reissued += 1
        self._again.append(replace(group.issue, issues=group.issue.issues + 1))

    # batches

    async def _next_batch(self) -> Batch:
        admission = self._admission
        admission.extend(admission.step + 1)
        self._changes.notify()
        while True:
            if self._failure is not None:
                error, self._failure = self._failure, None
                self._collection = Collection.of_batch(self._batch)
                raise error
            if self._closed:
                raise RolloutError(f"the executor was disposed while rollout {admission.step} was gathered")
            if (reason := admission.impossible()) is not None:
                raise RolloutError(f"{reason}; publish newer weights before this batch is asked for")
            decision = admission.next_batch()
            if isinstance(decision, Batch):
                return decision
            with WAITS.register("batch", str(decision), math.inf):  # every request below has its deadline
                await self._changes.wait()

    def _hand_over(self, batch: Batch) -> Taken:
        """Carries out what admission decided."""
        collection = self._collection
        for group in batch.surplus:
            self._drop(group, "surplus: no batch had room for it before it was too old")
            collection.surplus += 1
        for group in batch.reissue:
            self._drop(group, "straggler: not finished at its deadline, issued again")
            self._issue_again(group)
        samples = tuple(group.result for group in batch.groups if group.result is not None)
        self._ledger.deliver(self._admission.step, batch.groups)
        self._admission.advance()
        self._first_batch.closed = True
        self._collection = Collection.of_batch(self._batch)
        self._changes.notify()
        return Taken(batch.groups, samples, collection, len(self._ledger.groups(GroupState.FINISHED)))
