from __future__ import annotations

import pytest

from asyncrl.data.fleet import EngineEndpoint, UpdateAck
from asyncrl.errors import WeightUpdateError
from asyncrl.inference.updates.leases import LeaseBook, sort_acks

ENGINES = tuple(EngineEndpoint(f"engine-{i}", i, f"http://e{i}", 1) for i in range(3))


def granted(book: LeaseBook, version: str = "0.1", now: float = 100.0):
    return book.grant(book.next_id(version), version, ENGINES, paused_at=now, now=now, duration_s=60.0, settle_s=60.0)


def test_only_one_lease_is_open_at_a_time() -> None:
    book = LeaseBook()
    granted(book)
    with pytest.raises(WeightUpdateError, match=r"cannot begin .* 0\.2: lease lease-1 of version 0\.1 is open"):
        book.next_id("0.2")


def test_a_lease_ends_once_and_later_comers_learn_how() -> None:
    book = LeaseBook()
    lease = granted(book)
    assert lease.deadline == 160.0
    book.end(lease.lease_id, "was given up (it passed its deadline)")
    assert book.open is None
    assert book.has_ended(lease.lease_id)
    with pytest.raises(WeightUpdateError, match="lease lease-1 was given up"):
        book.claim(lease.lease_id)
    assert granted(book, "0.2").lease_id == "lease-2"


def test_an_invented_lease_is_refused() -> None:
    with pytest.raises(WeightUpdateError, match="lease-9 was never granted"):
        LeaseBook().claim("lease-9")


def test_engines_without_an_ack_or_with_one_from_an_older_process_do_not_hold_the_weights() -> None:
    lease = granted(LeaseBook())
    acks = [UpdateAck("engine-0", 0), UpdateAck("engine-1", 0)]
    holders, missing = sort_acks(lease, acks, {"engine-0": 0, "engine-1": 1, "engine-2": 2})
    assert holders == ("engine-0",)
    assert set(missing) == {"engine-1", "engine-2"}
    assert "did not acknowledge weights 0.1" in missing["engine-1"]


def test_an_engine_restarted_since_its_ack_does_not_hold_the_weights() -> None:
    lease = granted(LeaseBook())
    holders, missing = sort_acks(lease, [UpdateAck("engine-0", 0)], {"engine-0": 1, "engine-1": 1, "engine-2": 2})
    assert holders == ()
    assert "was restarted while it received weights 0.1" in missing["engine-0"]
