"""The life of an engine as a pure state machine: which state may follow which.

    STARTING --> PENDING_WEIGHTS --> UPDATING --> SERVING <--> OFFLOADED
                       ^________________|  ^_________|____________|
    STARTING --> SERVING                    where weights never change
    SERVING --> DRAINING --> STOPPED        any but STOPPED --> QUARANTINED | DEAD --> STARTING

Invariants
- An engine becomes SERVING only out of UPDATING (a commit: it holds the published version) or OFFLOADED (it held that
  version before). So no engine serves before it has weights of this run.
- A frozen engine, whose weights never change, serves once it has started, and is never updated.
- The router may know an engine only in a state of `ROUTABLE`.
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.data.fleet import EngineState

_S = EngineState

TRANSITIONS: Mapping[EngineState, frozenset[EngineState]] = {
    _S.STARTING: frozenset({_S.PENDING_WEIGHTS, _S.QUARANTINED, _S.DEAD, _S.STOPPED}),
    _S.PENDING_WEIGHTS: frozenset({_S.UPDATING, _S.OFFLOADED, _S.QUARANTINED, _S.DEAD, _S.STOPPED}),
    _S.SERVING: frozenset({_S.UPDATING, _S.OFFLOADED, _S.DRAINING, _S.QUARANTINED, _S.DEAD, _S.STOPPED}),
    _S.UPDATING: frozenset({_S.SERVING, _S.PENDING_WEIGHTS, _S.OFFLOADED, _S.QUARANTINED, _S.DEAD, _S.STOPPED}),
    _S.OFFLOADED: frozenset({_S.SERVING, _S.PENDING_WEIGHTS, _S.UPDATING, _S.QUARANTINED, _S.DEAD, _S.STOPPED}),
    _S.DRAINING: frozenset({_S.QUARANTINED, _S.DEAD, _S.STOPPED}),
    _S.QUARANTINED: frozenset({_S.STARTING, _S.DEAD, _S.STOPPED}),
    _S.DEAD: frozenset({_S.STARTING, _S.STOPPED}),
    _S.STOPPED: frozenset({_S.STARTING}),
}

FROZEN_TRANSITIONS: Mapping[EngineState, frozenset[EngineState]] = {
    _S.STARTING: frozenset({_S.SERVING, _S.QUARANTINED, _S.DEAD, _S.STOPPED}),
    _S.SERVING: frozenset({_S.DRAINING, _S.QUARANTINED, _S.DEAD, _S.STOPPED}),
    **{state: TRANSITIONS[state] for state in (_S.DRAINING, _S.QUARANTINED, _S.DEAD, _S.STOPPED)},
}
"""The transitions of engines whose weights never change."""

LIVE = frozenset({_S.STARTING, _S.PENDING_WEIGHTS, _S.SERVING, _S.UPDATING, _S.OFFLOADED, _S.DRAINING})
"""States in which a process is expected to run."""

UPDATABLE = frozenset({_S.PENDING_WEIGHTS, _S.SERVING, _S.OFFLOADED})
"""States from which an engine takes part in a weight update."""

ROUTABLE = frozenset({_S.SERVING, _S.UPDATING, _S.OFFLOADED})
"""States in which the router may know an engine; while UPDATING or OFFLOADED it is paused and requests wait in it."""


class IllegalTransition(RuntimeError):
    """A defect of the controller: it tried to move an engine to a state that does not follow."""


def transition(engine_id: str, current: EngineState, to: EngineState, *, frozen: bool = False) -> EngineState:
    """Returns `to` if an engine in state `current` may go there, else raises IllegalTransition.

    `frozen`: the engine's weights never change.
    """
    if to not in (FROZEN_TRANSITIONS if frozen else TRANSITIONS).get(current, ()):
        raise IllegalTransition(f"{engine_id} cannot go from {current} to {to}")
    return to
