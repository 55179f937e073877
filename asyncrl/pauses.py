"""The executor hears when engines are paused for new weights: where fleet and executor of a job meet.

Invariant: a pause that was told to the executor ends, however the update does; its clock never stands still for good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from asyncrl import interpreter

if TYPE_CHECKING:  # torch stays out of the driver until the engines are on their way
    from asyncrl.data.fleet import UpdateAck, UpdateLease
    from asyncrl.weights.publication import Fleet


class Paused(Protocol):
    """Who wants to know; a `RolloutExecutor` is one."""

    def engines_paused(self) -> None: ...

    def engines_resumed(self) -> None: ...


class ToldFleet:
    """A fleet as the weight plane sees it, whose updates are told to the executor.

    A pause is told from the moment in which it is asked for: an update that waits for engines which are being started
    again finds too few of them at work to hold requests to their deadlines.
    """

    def __init__(self, fleet: Fleet, executor: Paused) -> None:
        self._fleet = fleet
        self._executor = executor

    def copies_in_use(self) -> frozenset[Path]:
        return self._fleet.copies_in_use()

    async def begin_weight_update(self, version: str) -> UpdateLease:
        self._executor.engines_paused()
        try:
            lease = await self._fleet.begin_weight_update(version)
        except BaseException:  # a cancellation too
            self._executor.engines_resumed()
            raise
        interpreter.tidy()
        return lease

    async def commit_weight_update(self, lease_id: str, acks: Sequence[UpdateAck], directory: Path | None) -> None:
        await self._fleet.commit_weight_update(lease_id, acks, directory)
        self._executor.engines_resumed()

    async def abort_weight_update(self, lease_id: str, failed: Mapping[str, str], *, untouched: bool) -> None:
        try:
            await self._fleet.abort_weight_update(lease_id, failed, untouched=untouched)
        finally:
            self._executor.engines_resumed()
