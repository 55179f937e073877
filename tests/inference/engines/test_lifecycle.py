from __future__ import annotations

import itertools

import pytest

from asyncrl.data.fleet import EngineState
from asyncrl.inference.engines.lifecycle import (
    FROZEN_TRANSITIONS,
    LIVE,
    TRANSITIONS,
    UPDATABLE,
    IllegalTransition,
    transition,
)


def test_an_engine_serves_only_after_an_update_or_out_of_offload() -> None:
    origins = {state for state, nexts in TRANSITIONS.items() if EngineState.SERVING in nexts}
    assert origins == {EngineState.UPDATING, EngineState.OFFLOADED}


def test_a_new_engine_cannot_serve_without_weights() -> None:
    with pytest.raises(IllegalTransition, match="engine-0 cannot go from pending_weights to serving"):
        transition("engine-0", EngineState.PENDING_WEIGHTS, EngineState.SERVING)


@pytest.mark.parametrize("state", LIVE)
def test_any_live_engine_may_die_and_be_stopped(state: EngineState) -> None:
    for end in (EngineState.DEAD, EngineState.QUARANTINED, EngineState.STOPPED):
        assert transition("engine-0", state, end) is end


def test_the_dead_return_only_by_starting() -> None:
    assert TRANSITIONS[EngineState.DEAD] == {EngineState.STARTING, EngineState.STOPPED}


def test_every_state_has_its_row_and_every_updatable_state_leads_to_updating() -> None:
    assert set(TRANSITIONS) == set(EngineState)
    assert all(EngineState.UPDATING in TRANSITIONS[state] for state in UPDATABLE)


def test_an_engine_whose_weights_never_change_serves_at_once_and_is_never_updated() -> None:
    assert transition("judge-0", EngineState.STARTING, EngineState.SERVING, frozen=True) is EngineState.SERVING
    reachable = {state for nexts in FROZEN_TRANSITIONS.values() for state in nexts}
    assert not reachable & {EngineState.PENDING_WEIGHTS, EngineState.UPDATING, EngineState.OFFLOADED}
    assert reachable == set(FROZEN_TRANSITIONS)
    with pytest.raises(IllegalTransition):
        transition("judge-0", EngineState.SERVING, EngineState.UPDATING, frozen=True)


def test_what_is_not_listed_is_refused() -> None:
    for current, to in itertools.product(EngineState, EngineState):
        if to not in TRANSITIONS[current]:
            with pytest.raises(IllegalTransition):
                transition("e", current, to)
