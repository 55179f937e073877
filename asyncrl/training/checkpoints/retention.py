"""Which checkpoints are kept. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def to_remove(steps: Sequence[int], *, keep_last: int, keep_every: int) -> tuple[int, ...]:
    """Steps whose checkpoints may go, of those that exist.

    Args:
        steps: in the order of writing, newest last, which after a set-back need not be the order of steps.
        keep_last: at least 1, so that the newest always stays.
        keep_every: a step that it divides stays; 0 keeps none for that.
    """
    assert keep_last >= 1
    return tuple(step for step in steps[:-keep_last] if keep_every == 0 or step % keep_every != 0)
