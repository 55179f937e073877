"""Production: turns prompts into finished groups, as far ahead of the trainer as admission allows.

Which group may begin and which make up a batch is decided in `admission.py`; this is the shell around it: a task for
each group, the filters, and the wait for the next batch. A group is admitted only when it may get a slot of the engines
soon, so that tasks and memory follow what runs, not what might.

Invariants
- Every admitted group ends once, in a batch or with a reason (`ledger.py`); `aclose` sees to those that are left.
- Whoever gives up a `take` loses nothing: its groups stay for the next one.
- A failure that ends the run stops all generation, and is raised by the `take` in progress or else by the next.
- Every wait can be cancelled, also where groups end in each turn of the event loop (`_change`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import anyio
import anyio.abc
import anyio.lowlevel

from asyncrl.data.prompt_stream import PromptStream
from asyncrl.data.sample import Prompt, SampleGroup
from asyncrl.data.staleness import oldest_step, step_of
from asyncrl.errors import AsyncRLError, RolloutError
from asyncrl.observability.events import EventLog
from asyncrl.observability.waits import WAITS
from asyncrl.rollout.scheduling.admission import Admission, Batch, Limits
from asyncrl.rollout.scheduling.collection import Collection, drop_reason, first_failure
from asyncrl.rollout.scheduling.filters import Filters
from asyncrl.rollout.scheduling.ledger import Ledger, group_id_of

_CLOSE_TIMEOUT_S = 5.0
_MIN_DROPS = 8  # groups that one batch may lose even when it is small
_MAX_FILTERED = 32  # batches' worth of groups that filters may take out while one is gathered


@dataclass(frozen=True, slots=True)
class Issue:
    """A prompt on its way to become a group."""

    ordinal: int
    """Of its draw from the prompt stream."""
    prompt: Prompt
    epoch: int
    issues: int = 0
    """How often it was issued before."""

    @property
    def group_id(self) -> str:
        return group_id_of(self.ordinal, self.issues)


Generate = Callable[[Issue, Callable[[], None]], Awaitable[SampleGroup]]
"""Samples and scores a group; the second argument is called when its first request is under way."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What one `take` brought."""

    groups: tuple[SampleGroup, ...]
    epoch: int
    """Of the first group's prompt."""
    collection: Collection
    """What else was produced since the batch before."""
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
        ledger: Ledger,
        events: EventLog,
        waiting: int = 2,
    ) -> None:
        """A group with fewer than `min_usable` usable samples is dropped.

        `waiting` groups are admitted before they have a slot: as many as may find one in the same turn of the loop,
        which under load is a long one. Whoever waits costs nothing but memory: its deadline moves with the weights.
        """
        self._limits = limits
        self._waiting = waiting
        self._stream = stream
        self._generate = generate
        self._filters = filters
        self._min_usable = min_usable
        self._ledger = ledger
        self._events = events
        self._admission: Admission | None = None
        self._published: int | None = None
        self._again: deque[Issue] = deque()
        self._live: dict[str, Issue] = {}
        self._starting: set[str] = set()
        """Groups that were admitted, and have no request under way yet."""
        self._scopes: dict[str, anyio.CancelScope] = {}
        self._taken: dict[str, Issue] = {}
        """Of batches that are not committed."""
        self._taken_back: tuple[Issue, ...] = ()
        """Of batches that the end of the job found untrained."""
        self._finished: dict[str, SampleGroup] = {}
        self._failure: AsyncRLError | None = None
        self._taking: int | None = None
        self._serving = False
        self._closed = False
        self._ended = anyio.Event()
        self._changed = anyio.Event()
        self._collection = self._new_collection()

    async def serve(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Admits groups and runs their tasks until `aclose`."""
        self._serving = True
        try:
            async with anyio.create_task_group() as tasks:
                task_status.started()
                while not self._closed:
                    if (admission := self._may_admit()) is not None:
                        issue = self._admit(admission)
                        tasks.start_soon(self._run, issue, admission, name=f"group {issue.group_id}")
                    else:
                        await self._change()
                tasks.cancel_scope.cancel()
        finally:
            self._ended.set()

    async def aclose(self) -> None:
        """Ends what is being generated; what no batch took is dropped. Idempotent."""
        self._closed = True
        self._wake()
        if self._serving:
            with anyio.move_on_after(_CLOSE_TIMEOUT_S, shield=True):
                await self._ended.wait()
        for group_id in list(self._live):
            self._drop(group_id, "its rollout was not delivered")

    def run_ahead(self, first: int, horizon: int) -> None:
        """Begins to generate for the batches [first, horizon), as far ahead as the weights allow."""
        self._begin(first).extend(horizon)
        self._wake()

    def publish(self, step: int | None) -> None:
        """The engines hold weights of `step`; None: of no known step, as weights that never change."""
        self._published = step
        if self._admission is not None and step is not None:
            self._admission.publish(step)
            self._wake()

    async def take(self, step: int) -> Taken:
        """The groups of the batch of `step`, in the order of their deadlines; steps follow one another.

        Raises RolloutError out of order, for weights that are too old for the batch, when too many groups failed or
        were filtered, or on `aclose`; and what else made generation fail.
        """
        if self._taking is not None or self._closed:
            raise RolloutError(f"rollout {step} is being gathered already, or the executor was disposed")
        admission = self._begin(step)
        if step != admission.step:
            raise RolloutError(f"rollout {step} was asked for out of order; the next one is {admission.step}")
        self._taking = step
        try:
            return self._delivered(admission, await self._next_batch(admission))
        finally:
            self._taking = None

    def fail(self, error: AsyncRLError) -> None:
        """Stops generation; the `take` in progress, or the next one, raises `error`."""
        if self._failure is None:
            self._failure = error
            for group_id in list(self._live):
                self._remove(group_id, "its rollout was not delivered")
            self._wake()

    def committed(self, group_ids: Iterable[str]) -> None:
        """These groups were taken, and trained."""
        for group_id in group_ids:
            del self._taken[group_id]

    def take_back(self, group_ids: Iterable[str]) -> None:
        """The job ends, and these groups were taken and not trained: `save` says that they are to be issued again."""
        self._taken_back += tuple(self._taken.pop(group_id) for group_id in group_ids)

    def save(self) -> tuple[tuple[tuple[Issue, SampleGroup], ...], tuple[Issue, ...]]:
        """Groups that wait for a batch, and those that are to be issued again if the process ends now.

        Raises what made generation fail, as its groups are dropped already.
        """
        if self._failure is not None:
            raise self._failure
        finished = tuple((issue, self._finished[key]) for key, issue in self._live.items() if key in self._finished)
        unfinished = (issue for group_id, issue in self._live.items() if group_id not in self._finished)
        return finished, (*self._taken_back, *unfinished, *self._again)

    def restore(
        self, step: int, finished: Sequence[tuple[Issue, SampleGroup]], again: Sequence[Issue]
    ) -> tuple[str, ...]:
        """Goes on before the batch of `step` with what `save` returned; before anything else. Returns what came back.

        Finished groups that no batch may train are issued again: made by weights that came after `step`, or too old,
        or more than the batches take, where these became smaller.
        """
        admission = self._begin(step)
        for issue, group in finished:
            spans = [span for sample in group.samples if sample.reward is not None for span in sample.versions]
            ahead = any((made := step_of(span.version)) is not None and made > step for span in spans)
            if admission.restore(group.group_id, oldest_step(spans)) and not ahead:
                self._live[group.group_id], self._finished[group.group_id] = issue, group
            else:
                admission.remove(group.group_id)
                self._again.append(issue)
        for group_id in admission.without_place():
            admission.remove(group_id)
            del self._finished[group_id]
            self._again.append(self._live.pop(group_id))
        self._again.extend(again)
        return tuple(self._finished)

    # what is live

    def _begin(self, first: int) -> Admission:
        if self._admission is None:
            self._admission = Admission(self._limits, first=first)
            if self._published is not None:
                self._admission.publish(self._published)
        return self._admission

    def _may_admit(self) -> Admission | None:
        """Where the next group is to be admitted; None while none may be, or enough wait for a slot."""
        admission = self._admission
        if admission is None or self._failure is not None or len(self._starting) >= self._waiting or not admission.room:
            return None
        return admission

    def _admit(self, admission: Admission) -> Issue:
        if self._again:
            issue = self._again.popleft()
        else:
            draw = self._stream.draw()
            issue = Issue(draw.ordinal, draw.prompt, draw.epoch)
        self._events.emit(self._ledger.admit(issue.group_id, issue.prompt.prompt_id, issue.epoch))
        admission.admit(issue.group_id)
        self._live[issue.group_id] = issue
        self._starting.add(issue.group_id)
        return issue

    async def _run(self, issue: Issue, admission: Admission) -> None:
        group_id = issue.group_id

        def started() -> None:
            if group_id in self._live:
                self._starting.remove(group_id)
                admission.start(group_id)
                self._events.emit(self._ledger.run(group_id))
                self._wake()

        if group_id not in self._live:  # dropped before this task had its first turn
            return
        with anyio.CancelScope() as self._scopes[group_id]:
            try:
                group = await self._generate(issue, started)
                if group_id in self._live:  # else it was dropped just before its end
                    self._scored(issue, group, admission)
            except AsyncRLError as error:
                self.fail(error)
        del self._scopes[group_id]

    def _scored(self, issue: Issue, group: SampleGroup, admission: Admission) -> None:
        """A group is there: kept for a batch, or out with a reason and a place for another."""
        group_id, collection = group.group_id, self._collection
        reason = drop_reason(group, self._min_usable)
        if reason is not None:
            self._remove(group_id, reason)
            error = collection.drop(reason, first_failure(group))
        else:
            error = self._judge(issue, group, admission)
        if error is not None:
            self.fail(error)
        self._wake()

    def _judge(self, issue: Issue, group: SampleGroup, admission: Admission) -> RolloutError | None:
        """Finishes a usable group; returns an error when there is no end of groups that cannot be trained."""
        group_id = group.group_id
        usable = [sample for sample in group.samples if sample.reward is not None]
        self._events.emit(self._ledger.finish(group_id, len(usable), len(group.samples) - len(usable)))
        objection = self._filters.objection(group)
        if objection is not None:
            self._events.emit(self._ledger.filter(group_id, objection))
            admission.remove(group_id)
            del self._live[group_id]
            return self._collection.filter(objection)
        oldest = oldest_step(span for sample in usable for span in sample.versions)
        if admission.finish(group_id, oldest):
            self._finished[group_id] = group
            return None
        reason = "made by weights that are too old for every batch to come"
        self._remove(group_id, reason)
        self._issue_again(issue)
        return self._collection.drop(reason, f"group {group_id}, weights of step {oldest}, batch {admission.step}")

    def _remove(self, group_id: str, reason: str) -> None:
        """Drops a group and frees its place."""
        if self._admission is not None:
            self._admission.remove(group_id)
        self._drop(group_id, reason)

    def _drop(self, group_id: str, reason: str) -> None:
        self._events.emit(self._ledger.drop(group_id, reason))
        del self._live[group_id]
        self._finished.pop(group_id, None)
        self._starting.discard(group_id)
        if (scope := self._scopes.get(group_id)) is not None:
            scope.cancel()

    def _issue_again(self, issue: Issue) -> None:
        self._collection.reissued += 1
        self._again.append(replace(issue, issues=issue.issues + 1))

    # batches

    async def _next_batch(self, admission: Admission) -> Batch:
        admission.extend(admission.step + 1)
        self._wake()
        while True:
            if self._failure is not None:
                error, self._failure, self._collection = self._failure, None, self._new_collection()
                raise error
            if self._closed:
                raise RolloutError(f"the executor was disposed while rollout {admission.step} was gathered")
            if (reason := admission.impossible()) is not None:
                raise RolloutError(f"{reason}; publish newer weights before this batch is asked for")
            decision = admission.next_batch()
            if isinstance(decision, Batch):
                return decision
            with WAITS.register("batch", str(decision), math.inf):  # every request below has its deadline
                await self._change()

    def _delivered(self, admission: Admission, batch: Batch) -> Taken:
        """Carries out what admission decided."""
        collection = self._collection
        admission.take(batch)
        for group_id in batch.surplus:
            self._drop(group_id, "surplus: no batch had room for it before it was too old")
            collection.surplus += 1
        for group_id in batch.reissue:
            issue = self._live[group_id]
            self._drop(group_id, "straggler: not finished at its deadline, issued again")
            self._issue_again(issue)
        epoch = self._live[batch.groups[0]].epoch
        self._taken.update((group_id, self._live.pop(group_id)) for group_id in batch.groups)
        taken = tuple(self._finished.pop(group_id) for group_id in batch.groups)
        self._collection = self._new_collection()
        self._wake()
        return Taken(taken, epoch, collection, admission.finished)

    def _new_collection(self) -> Collection:
        batch = self._limits.batch
        return Collection(batch, max_drops=max(_MIN_DROPS, 2 * batch), max_filtered=_MAX_FILTERED * batch)

    async def _change(self) -> None:
        """Returns once something happened.

        anyio cancels a task whose wait goes on, and this one may end in every turn before anyio looks: so it asks.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
