"""A publication as data: the fleet that it goes to, its limits, its outcome. Pure, but for the events.

`publisher.py` carries publications out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from asyncrl.config import Config
from asyncrl.data.fleet import EngineEndpoint, UpdateAck, UpdateLease
from asyncrl.weights.copies import Readers
from asyncrl.weights.transfer import TransferFault, TransferResult


class Fleet(Readers, Protocol):
    """The inference controller as the weight plane sees it."""

    async def begin_weight_update(self, version: str) -> UpdateLease:
        """Pauses every updatable engine, stamps `torn:<version>` on it and opens a session."""

    async def commit_weight_update(
        self, lease_id: str, acks: Sequence[UpdateAck], directory: Path | None, *, copy_due: float | None = None
    ) -> None:
        """Closes the sessions, verifies, stamps, continues; quarantines leased engines without an ack.

        `directory` holds a copy of the weights for engines that join later; None where none is kept. With `copy_due`
        it is still being written: `copy_written` tells how that ended, by that time (anyio.current_time).
        """

    async def abort_weight_update(self, lease_id: str, failed: Mapping[str, str], *, untouched: bool) -> None:
        """Takes the engines back: none stays paused, and none serves torn weights. Does nothing for an ended lease.

        Args:
            failed: engine id → reason, of engines that are lost.
            untouched: no tensor was sent, so engines go on with what they held.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationLimits:
    """How long each part of a publication may take, and how often it is tried. Times are in seconds.

    For what the fleet itself does at the end of an update, the lease says how long that may take.
    """

    transfers: int = 2
    """Transfers within one transaction before it fails, at least 1; and transactions, where one lost every engine: the
    next waits for engines that are being started again."""
    turn_timeout_s: float = 1800.0
    """Longest wait until the trainer thread is free, before anything is paused."""
    begin_timeout_s: float = 1200.0
    """Longest wait until engines that are being started again can take part, and each is paused and has a session."""
    abandon_timeout_s: float = 180.0
    """Longest wait until a failed transfer has let go of its engines, before it is repeated."""
    cleanup_timeout_s: float = 10.0
    """How long a cancelled commit may go on, and how long the end of a transfer may take after a failure."""
    copy_timeout_s: float = 600.0
    """How long the disk may take for a copy, beside the training; then there is none."""

    def __post_init__(self) -> None:
        if self.transfers < 1:
            raise ValueError(f"transfers must be at least 1, not {self.transfers}")

    @classmethod
    def of(cls, config: Config) -> PublicationLimits:
        """The limits of a job. A begin may take longer than all that happens in it.

        That are the fleet's own bounds (starts, pauses, sessions), and that of requests which are to end first.
        """
        fleet_s = config.engine.start_timeout_s + config.router.start_timeout_s + config.weights.lease_timeout_s
        begin_timeout_s = fleet_s + config.rollout.request_timeout_s
        return cls(transfers=config.weights.attempts, begin_timeout_s=begin_timeout_s)


METRICS: Mapping[str, str] = {
    "weights/publish_s": "Seconds of the publication, the wait for the trainer thread included.",
    "weights/pause_s": "Seconds from the first pause to the last continue: the longest that any engine stood still.",
    "weights/transfer_s": "Seconds of the transfers alone, failed ones included.",
    "weights/bytes": "Bytes of the weights, once, whatever the number of engines.",
    "weights/transfers": "Transfers that were made; 1 when nothing failed.",
    "weights/engines": "Engines that serve the new weights.",
}
"""What the figures of a publication are."""


@dataclass(frozen=True, slots=True)
class PublicationReport:
    """One publication that was committed."""

    version: str
    seconds: float
    """The whole, the wait for the trainer thread included."""
    pause_s: float
    """From the first pause to the last continue: the longest that any engine stood still."""
    transfer_s: float
    """Transfers alone, failed ones included."""
    bytes: int
    """Payload of the last transfer, once, whatever the number of engines."""
    attempts: int
    """Transfers that were made; 1 when nothing failed."""
    engines: tuple[str, ...]
    """Engines that now serve `version`."""
    failed: Mapping[str, str]
    """Engines that were lost on the way, with the reason."""

    def metrics(self) -> dict[str, float]:
        """Numbers for metrics.jsonl."""
        return {
            "weights/publish_s": self.seconds,
            "weights/pause_s": self.pause_s,
            "weights/transfer_s": self.transfer_s,
            "weights/bytes": self.bytes,
            "weights/transfers": self.attempts,
            "weights/engines": len(self.engines),
        }


def engines_to_retry(
    engines: Sequence[EngineEndpoint], result: TransferResult, *, complete: bool = False
) -> tuple[EngineEndpoint, ...]:
    """The engines of the next transfer: all that can still be brought to the version.

    An engine that gave no answer is out. One that refused is out as long as others remain: it would fail again, and
    they would wait. Once some engine is `complete`, only those that suffered from another fault are sent it again.
    """
    kinds = {engine_id: failure.kind for engine_id, failure in result.failures.items()}
    if complete:
        return tuple(e for e in engines if kinds.get(e.engine_id) is TransferFault.COLLATERAL)
    willing = tuple(e for e in engines if kinds.get(e.engine_id) not in (TransferFault.GONE, TransferFault.REFUSED))
    return willing or tuple(e for e in engines if kinds.get(e.engine_id) is TransferFault.REFUSED)
