"""The rule which checkpoints are kept. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def to_remove(steps: Sequence[int], *, keep_last: int, keep_every: int) -> tuple[int, ...]:
    """Returns the steps whose checkpoints may be removed.

    Args:
        steps: those that exist, in the order of writing, newest last; after a set-back this is not the order of steps.
        keep_last: how many of the newest stay; at least 1.
        keep_every: checkpoints of steps that are its multiples stay too; 0 keeps none for that reason.
    """
    assert keep_last >= 1
    return tuple(step for step in steps[:-keep_last] if keep_every == 0 or step % keep_every != 0)
