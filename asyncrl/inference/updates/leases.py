"""The book of weight-update leases: which engines are leased, until when. Pure: time is passed in.

Invariants
- At most one lease is open, and a lease ends exactly once: committed, aborted or expired.
- An ack counts only if its engine is in the lease with the same generation: one from an older process is void.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asyncrl.data.fleet import EngineEndpoint, UpdateAck, UpdateLease
from asyncrl.errors import WeightUpdateError


class LeaseBook:
    """Grants and ends leases."""

    def __init__(self) -> None:
        self._open: UpdateLease | None = None
        self._ended: dict[str, str] = {}
        self._count = 0

    @property
    def open(self) -> UpdateLease | None:
        """The lease that was granted and has not ended."""
        return self._open

    def next_id(self, version: str) -> str:
        """A new lease id; raises WeightUpdateError while another lease is open."""
        if self._open is not None:
            raise WeightUpdateError(
                f"cannot begin weight update {version}: lease {self._open.lease_id} of version {self._open.version} "
                "is open; commit or abort it first"
            )
        self._count += 1
        return f"lease-{self._count}"

    def grant(
        self,
        lease_id: str,
        version: str,
        engines: Sequence[EngineEndpoint],
        *,
        paused_at: float,
        now: float,
        duration_s: float,
        settle_s: float,
    ) -> UpdateLease:
        """Opens a lease that expires `duration_s` seconds after `now`; times are monotonic, see `UpdateLease`."""
        self._open = UpdateLease(lease_id, version, paused_at, now + duration_s, tuple(engines), settle_s)
        return self._open

    def claim(self, lease_id: str) -> UpdateLease:
        """The open lease of that id; raises WeightUpdateError when it has ended, saying how."""
        if self._open is None or self._open.lease_id != lease_id:
            how = self._ended.get(lease_id, "was never granted")
            raise WeightUpdateError(f"lease {lease_id} {how}")
        return self._open

    def end(self, lease_id: str, how: str) -> None:
        """Ends the open lease; `how` completes the sentence "lease-3 ..." for later callers.

        Raises WeightUpdateError as `claim` does.
        """
        self.claim(lease_id)
        self._open = None
        self._ended[lease_id] = how

    def has_ended(self, lease_id: str) -> bool:
        """Whether the lease was granted and has ended."""
        return lease_id in self._ended


def sort_acks(
    lease: UpdateLease, acks: Sequence[UpdateAck], generations: Mapping[str, int]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Ids of the engines that hold the new weights, and for every other engine of the lease the reason why not.

    `generations` are those of the engines' present processes, by engine id.
    """
    acked = {(ack.engine_id, ack.generation) for ack in acks}
    holders: list[str] = []
    missing: dict[str, str] = {}
    for engine in lease.engines:
        if (engine.engine_id, engine.generation) not in acked:
            missing[engine.engine_id] = f"did not acknowledge weights {lease.version}"
        elif generations.get(engine.engine_id) != engine.generation:
            missing[engine.engine_id] = f"was restarted while it received weights {lease.version}"
        else:
            holders.append(engine.engine_id)
    return tuple(holders), missing
