from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.host.unanswered import Patience


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 2))), st.floats(0.1, 10))
def test_rank_zero_is_ended_once_a_signal_has_stood_for_its_patience_and_never_before(
    looks: list[tuple[bool, float]], patience_s: float
) -> None:
    patience, now, since = Patience(patience_s), 0.0, None
    for standing, later in looks:
        now += later
        since = (now if since is None else since) if standing else None
        assert patience.exhausted(standing, now) == (since is not None and now - since >= patience_s)
