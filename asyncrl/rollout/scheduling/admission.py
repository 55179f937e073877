"""Admission: which group may begin, and which finished groups make up the next batch. Pure: no I/O, no clock.

Unit: batches. Let j be the step whose batch is taken next, t the step whose weights are published, B the groups of a
batch, s how many steps old a token may be when its batch is trained (`Bound.batches` in data/staleness.py), and O the
over-sampling allowance.

- *Admit* a group iff consumed + live < (t + s + 1)·B + O. Live is what was admitted and neither taken nor removed, so a
  group that is filtered or dropped frees its place at once.
- *Deadline* of a group: the step of the weights that made its oldest token, plus s. Until it is finished that step is
  not known; the one published when it was started (t, while it has not) is a lower bound.
- *Take* for step j the B finished groups of earliest deadline, provided that of what stays live at most
  (k - j)·B have a deadline <= k, for every k >= j; otherwise wait for the unfinished ones among those.

Invariants
- No group is taken after its deadline.
- There is always something to wait for, or a batch: at most (k + 1)·B unfiltered groups are ever admitted with a
  deadline <= k, since that takes t <= k - s; each batch that keeps the rule for every k leaves a state from which the
  next one can. Without this look-ahead it fails at s = 2, as the example shows.

Example: B = 2, s = 2, O = 0, and new weights after every batch.

    t = 0   (0 + 2 + 1)·2 = 6 groups may begin: a b c d e f, all with deadline 0 + 2 = 2.
    j = 0   a and b finish first. Were they taken, c d e f would stay: 4 groups with deadline <= 2, and the batches
            of steps 1 and 2 have (2 - 0)·2 = 4 places for them. Take a b.
    t = 1   2 places are free: g h begin, with deadline 1 + 2 = 3.
    j = 1   g and h finish first. Were they taken, c d e f would still be 4 groups with deadline <= 2, and only the
            batch of step 2 is left for them, with (2 - 1)·2 = 2 places. So wait until two of c d e f are finished,
            and take those: their deadline is the earlier one. Earliest deadline first without the look-ahead would
            take g h here, and then two of c d e f could never be trained.

The allowance O loosens the rule for k > j by O groups, because up to O can still be dropped: what would have to be in
batch j and finds no place is dropped as surplus; where s lets it live on, it stays for a later batch. With
`straggler = "reissue"` an unfinished group never holds up a batch that could be had without it: it is dropped, to be
issued again.

The groups are those of the ledger. All queries cost O(s) but for the choice of a batch, which sorts the finished ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Literal

from asyncrl.rollout.scheduling.group import Group, GroupState
from asyncrl.rollout.scheduling.ledger import Ledger

_NEVER = 1 << 60
"""Deadline of a group whose weights have no version: such weights never change."""
_NAMED = 3
"""Most groups that a `Waiting` names."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The constants of the rule."""

    batch: int
    """B: groups of one batch."""
    staleness: int
    """s: steps between the weights that made a token and the step that trains it, at most."""
    oversample: int = 0
    """O: groups that may be live beyond what batches need, so that filters leave enough."""
    straggler: Literal["wait", "reissue"] = "wait"


@dataclass(frozen=True, slots=True)
class Batch:
    """What the caller is to do for the next step: move these groups in the ledger, then `advance`."""

    groups: tuple[Group, ...]
    """B finished groups, earliest deadline first, then as admitted."""
    surplus: tuple[Group, ...] = ()
    """Groups that no batch has room for before their deadline: to be dropped."""
    reissue: tuple[Group, ...] = ()
    """Unfinished groups at their deadline: to be dropped, their prompts issued again."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why there is no batch now."""

    missing: int
    """Finished groups that lack for a batch of any kind; 0 when the deadline of `groups` holds the batch up."""
    groups: tuple[Group, ...]
    """The oldest of the unfinished groups that are waited for; some may still have to be admitted."""

    def __str__(self) -> str:
        named = ", ".join(group.group_id for group in self.groups)
        if self.missing:
            return f"{self.missing} more groups" + (f", the oldest: {named}" if named else "")
        return f"{named}: to be trained now or never"


class Admission:
    """The rule over the groups of a ledger, which it only reads. Its own state are three steps."""

    def __init__(self, limits: Limits, ledger: Ledger) -> None:
        """Admits nothing before `begin` and `extend`."""
        self._limits = limits
        self._ledger = ledger
        self._begun = False
        self._step = 0
        self._horizon = 0
        self._published: int | None = None

    @property
    def step(self) -> int:
        """j: the step whose batch is taken next."""
        return self._step

    @property
    def live(self) -> int:
        """Groups that were admitted and neither taken nor removed."""
        groups = self._ledger.groups
        return len(groups(GroupState.ADMITTED)) + len(groups(GroupState.RUNNING)) + len(groups(GroupState.FINISHED))

    @property
    def room(self) -> int:
        """Groups that may be admitted now."""
        limits = self._limits
        newest = self._step if self._published is None else self._published
        batches = min(newest + limits.staleness + 1, self._horizon) - self._step
        return max(0, batches * limits.batch + limits.oversample - self.live) if batches > 0 else 0

    # what changes

    def begin(self, first: int) -> None:
        """The first batch is that of step `first`; earlier attempts of the job took those before. Once."""
        if not self._begun:
            self._begun, self._step, self._horizon = True, first, first

    def extend(self, horizon: int) -> None:
        """Batches of steps below `horizon` will be wanted; nothing is admitted for later ones."""
        self._horizon = max(self._horizon, horizon)

    def publish(self, step: int) -> None:
        """The engines hold the weights of `step` now (t). Until the first call nothing is ever stale."""
        self._published = step

    def advance(self) -> None:
        """The batch of `step` was taken; the next one is wanted now."""
        self._step += 1

    # deadlines

    @property
    def newest_deadline(self) -> int:
        """Deadline of a group that is started now: its tokens are made by the published weights, or by newer ones."""
        return _NEVER if self._published is None else self._published + self._limits.staleness

    def deadline(self, group: Group, oldest: int | None) -> int:
        """Deadline of a running group whose samples have all ended.

        `oldest` is the step of the weights that made its oldest token, None if they have none.
        """
        assert group.deadline is not None, "finished before it was started"
        return group.deadline if self._published is None or oldest is None else oldest + self._limits.staleness

    def restored_deadline(self, oldest: int | None) -> int:
        """Deadline of a group that an earlier attempt finished; `oldest` as in `deadline`."""
        return _NEVER if oldest is None else oldest + self._limits.staleness

    def with_place(self, deadlines: Sequence[int]) -> set[int]:
        """Which of the restored groups with these deadlines some batch has room for in time; indices.

        The allowance counts as room. All of them have a place, unless batches or the bound are smaller than in the
        attempt that saved the groups.
        """
        limits, placed = self._limits, set[int]()
        for index in sorted(range(len(deadlines)), key=deadlines.__getitem__):
            batches = deadlines[index] - self._step + 1
            if batches > 0 and len(placed) < batches * limits.batch + limits.oversample:
                placed.add(index)
        return placed

    # the next batch

    def impossible(self) -> str | None:
        """Why no batch can come before newer weights are published, or None."""
        if self._published is None or self._published + self._limits.staleness >= self._step:
            return None
        return (
            f"the batch of step {self._step} may be made by weights of step {self._step} - {self._limits.staleness} = "
            f"{self._step - self._limits.staleness} or newer, and those of step {self._published} are published"
        )

    def next_batch(self) -> Batch | Waiting:
        """The batch of `step`, or what it waits for. Changes nothing."""
        missing = self._limits.batch - len(self._ledger.groups(GroupState.FINISHED))
        if missing > 0:
            return Waiting(missing, tuple(islice(self._unfinished(_NEVER), _NAMED)))
        over = list(self._over())
        return self._without_late(over) if over else Batch(tuple(self._in_order()[: self._limits.batch]))

    def _over(self) -> Iterator[tuple[int, int]]:
        """(k, n) wherever n groups too many with a deadline <= k would stay after a batch, in order of k."""
        batch, newest = self._limits.batch, self.newest_deadline
        running, done = self._ledger.due(GroupState.RUNNING), self._ledger.due(GroupState.FINISHED)
        admitted = len(self._ledger.groups(GroupState.ADMITTED))
        unfinished = finished = 0
        for k in sorted({*running, *done, newest}):
            unfinished += running.get(k, 0) + (admitted if k == newest else 0)
            finished += done.get(k, 0)
            later = k - self._step
            room = later * batch + self._limits.oversample if later > 0 else 0
            if (excess := unfinished + max(0, finished - batch) - room) > 0:
                yield k, excess

    def _without_late(self, over: list[tuple[int, int]]) -> Batch | Waiting:
        """The batch that drops the `over`, as far as that is allowed; unfinished groups first, the youngest first."""
        limits = self._limits
        dropped: dict[Group, bool] = {}
        """Whether to issue it again."""
        finished: list[Group] | None = None
        for k, excess in over:
            spare = max(0, limits.oversample - len(dropped)) if k <= self._step else 0
            if limits.straggler == "wait" and excess - len(dropped) > spare:
                late = (group for group in self._unfinished(k) if group not in dropped)
                if named := tuple(islice(late, _NAMED)):
                    return Waiting(0, named)
            finished = finished or self._in_order()
            left = [group for group in finished[limits.batch :] if _deadline(group) <= k]
            for group in (*reversed(list(self._unfinished(k))), *reversed(left)):
                if len(dropped) >= excess:
                    break
                if group not in dropped:
                    # Finished ones beyond O: an engine served weights older than those published. Waiting is no use.
                    dropped[group] = spare <= 0 and group.state is not GroupState.FINISHED
                    spare -= 1
        return Batch(
            tuple((finished or self._in_order())[: limits.batch]),
            surplus=tuple(group for group, again in dropped.items() if not again),
            reissue=tuple(group for group, again in dropped.items() if again),
        )

    def _unfinished(self, k: int) -> Iterator[Group]:
        """Unfinished groups with a deadline <= k, in the order in which they were, or will be, started."""
        running = (group for group in self._ledger.groups(GroupState.RUNNING) if _deadline(group) <= k)
        admitted = self._ledger.groups(GroupState.ADMITTED) if self.newest_deadline <= k else ()
        return chain(running, admitted)

    def _in_order(self) -> list[Group]:
        """Finished groups, earliest deadline first, then as admitted."""
        finished = self._ledger.groups(GroupState.FINISHED)
        return sorted(finished, key=lambda group: (_deadline(group), group.order))


def _deadline(group: Group) -> int:
    """The deadline of a group that was started."""
    assert group.deadline is not None
    return group.deadline
