"""What the event log of a job says of its prompt groups, over all attempts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from asyncrl.observability.events import read_events
from asyncrl.rollout.group_events import (
    GroupAdmitted,
    GroupDropped,
    GroupFiltered,
    GroupsRestored,
    GroupsRolledBack,
    GroupsTrained,
)


class Told:
    """What an event log tells of all attempts."""

    def __init__(self, path: Path) -> None:
        self.trained: dict[int, tuple[str, ...]] = {}
        """By rollout id, without what was rolled back."""
        self.prompts: dict[str, str] = {}
        self.attempts = 0
        self.restored = 0
        self.rolled_back = 0
        """Trained groups that were."""
        self.ended: set[str] = set()
        """Groups that were trained, filtered or dropped, without what was rolled back."""
        for event in read_events(path):
            self.attempts = max(self.attempts, 1 + event.get("attempt", 0))
            if event["kind"] == GroupAdmitted.kind:
                assert self.prompts.setdefault(event["group_id"], event["prompt_id"]) == event["prompt_id"]
            elif event["kind"] == GroupsTrained.kind:
                assert event["rollout_id"] not in self.trained, "a step was trained twice"
                self.trained[event["rollout_id"]] = tuple(event["group_ids"])
                for group_id in event["group_ids"]:
                    self._end(group_id)
            elif event["kind"] in (GroupFiltered.kind, GroupDropped.kind):
                self._end(event["group_id"])
            elif event["kind"] == GroupsRestored.kind:
                self.restored += len(event["group_ids"])
            elif event["kind"] == GroupsRolledBack.kind:
                undone = [self.trained.pop(step) for step in sorted(self.trained) if step >= event["step"]]
                back = set(event["group_ids"])
                assert set().union(*undone) <= back <= self.ended and len(back) == len(event["group_ids"])
                assert back.isdisjoint(self.groups), "what the checkpoint holds as trained was rolled back"
                self.ended -= back
                self.rolled_back += sum(map(len, undone))

    def _end(self, group_id: str) -> None:
        assert group_id not in self.ended, f"group {group_id} ended twice, and not because it was rolled back"
        self.ended.add(group_id)

    @property
    def groups(self) -> Counter[str]:
        return Counter(group_id for batch in self.trained.values() for group_id in batch)
