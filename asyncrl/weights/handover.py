"""Handover: what trainer ranks and rank 0 tell each other while engines read weights from the GPUs that they share.

    rank r: the exporting thread            rank 0: the event loop                  engines
    Desk.offer ──── Offer(bucket, handles) ────► one offer of each rank ──────────► read the bucket
               ◄─── Taken(bucket) ────────────── every engine has answered ◄─────── answer
               ◄─── Stopped(reason) ──────────── nothing more is offered

Between processes the messages travel over the rank link (`training/ranks/rank_link.py`).

Invariants
- A rank offers one bucket at a time, and keeps it untouched until it is told that the bucket was taken.
- Exports are numbered, and numbers grow. The end of an export ends all before it, and a late message of one that has
  ended changes nothing.
- A rank waits no longer than `Handover.wait_s` for an answer, whatever happens to rank 0.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import msgspec

from asyncrl.errors import WeightUpdateError
from asyncrl.observability.waits import WAITS

_MARGIN_S = 5.0
"""Rank 0 decides first: it waits for ranks and engines by the same timeout."""


class Handover(msgspec.Struct, frozen=True):
    """An export in which ranks offer the tensors on their own GPUs to engines."""

    number: int
    """Of the export; each is larger than those before."""
    ranks: tuple[int, ...]
    """Trainer ranks that offer; the others only walk through the export."""
    bucket_bytes: int
    timeout_s: float
    """Longest wait for the offers of a bucket, and then for the engines that read it."""

    @property
    def wait_s(self) -> float:
        """Longest wait of a rank that has offered a bucket."""
        return 2 * self.timeout_s + _MARGIN_S


class Offer(msgspec.Struct, frozen=True, tag=True):
    """A rank has a bucket ready, or has failed and offers nothing more."""

    export: int
    bucket: int
    handles: str
    """As one tensor-parallel rank of an engine reads them; empty where the rank failed."""
    error: str | None = None


class Taken(msgspec.Struct, frozen=True, tag=True):
    """The engines have read a bucket."""

    export: int
    bucket: int


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """A rank offers nothing more in this export."""

    export: int
    reason: str | None = None
    """Why the export failed; None: it goes on, but no engine is left that reads from this rank."""


class OtherRanks(Protocol):
    """The trainer's ranks other than 0, as rank 0 hears and tells them during an export."""

    def listen(self, take: Callable[[int, Offer], None]) -> None:
        """From now on calls `take` in the event loop with each offer and the rank that made it."""

    async def tell(self, ranks: Collection[int], message: Taken | Stopped) -> None:
        """Sends `message` to those of `ranks` that are connected; also in a task that is being cancelled."""

    @property
    def stacks(self) -> Mapping[int, str]:
        """Where ranks were when they were asked last."""

    async def ask_stacks(self, timeout_s: float) -> None:
        """Asks every rank where it is, and fills `stacks` with the answers that come in time."""


class Desk:
    """One rank's end: a thread offers buckets here and waits, and another one says what becomes of them."""

    def __init__(self, send: Callable[[Offer], None]) -> None:
        """`send` gets an offer to rank 0; called in the exporting thread."""
        self._send = send
        self._changed = threading.Condition()
        self._taken = (0, -1)
        """Export and bucket of the newest `Taken`."""
        self._stopped = Stopped(0)

    def hear(self, message: Taken | Stopped) -> None:
        """Takes what rank 0 says. Called in any thread."""
        with self._changed:
            if isinstance(message, Taken):
                self._taken = max(self._taken, (message.export, message.bucket))
            elif message.export >= self._stopped.export:
                self._stopped = message
            self._changed.notify_all()

    def offer(self, offer: Offer, wait_s: float) -> bool:
        """Offers a bucket and waits until it was taken. Returns False where this rank is to offer nothing more.

        Raises WeightUpdateError: the export has failed, or no answer came within `wait_s`.
        """
        if not self._is_stopped(offer):
            self._send(offer)
        with WAITS.register("handover of a bucket", "engines", wait_s), self._changed:
            if not self._changed.wait_for(lambda: self._is_taken(offer) or self._is_stopped(offer), wait_s):
                raise WeightUpdateError(f"bucket {offer.bucket} was not taken within {wait_s:g} s")
            if self._is_taken(offer):
                return True
            reason = self._stopped.reason if self._stopped.export == offer.export else "a later export has begun"
        if reason is not None:
            raise WeightUpdateError(reason)
        return False

    def fail(self, export: int, error: Exception) -> None:
        """Tells rank 0 that this rank can offer nothing more."""
        told = str(error) if isinstance(error, WeightUpdateError) else f"{type(error).__name__}: {error}"
        self._send(Offer(export, -1, "", told))

    def _is_taken(self, offer: Offer) -> bool:
        return self._taken >= (offer.export, offer.bucket)

    def _is_stopped(self, offer: Offer) -> bool:
        return self._stopped.export >= offer.export
