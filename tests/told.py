"""What the event log of a job says of its prompt groups, over all attempts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from asyncrl.observability.events import read_events
from asyncrl.rollout.events import GroupAdmitted, GroupsRestored, GroupsRolledBack, GroupsTrained


class Told:
    """What an event log tells of all attempts."""

    def __init__(self, path: Path) -> None:
        self.trained: dict[int, tuple[str, ...]] = {}
        """By rollout id, without what was rolled back."""
        self.prompts: dict[str, str] = {}
        self.attempts = 0
        self.restored = 0
        self.rolled_back = 0
        for event in read_events(path):
            self.attempts = max(self.attempts, 1 + event.get("attempt", 0))
            if event["kind"] == GroupAdmitted.kind:
                assert self.prompts.setdefault(event["group_id"], event["prompt_id"]) == event["prompt_id"]
            elif event["kind"] == GroupsTrained.kind:
                assert event["rollout_id"] not in self.trained, "a step was trained twice"
                self.trained[event["rollout_id"]] = tuple(event["group_ids"])
            elif event["kind"] == GroupsRestored.kind:
                self.restored += len(event["group_ids"])
            elif event["kind"] == GroupsRolledBack.kind:
                undone = [self.trained.pop(step) for step in sorted(self.trained) if step >= event["step"]]
                assert event["group_ids"] == [group_id for batch in undone for group_id in batch]
                self.rolled_back += len(event["group_ids"])

    @property
    def groups(self) -> Counter[str]:
        return Counter(group_id for batch in self.trained.values() for group_id in batch)
