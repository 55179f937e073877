"""The valid name that a mistyped one most likely meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

_ENOUGH = 0.6  # similarity in [0, 1] under which a suggestion would mislead


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The most similar of `known`, or None when nothing is similar.

    A dotted name is compared as a whole and by its last part, so that a key put into the wrong section
    (`train.temperature`) or into none (`lr`) finds its home.
    """
    own = name.rpartition(".")[2]
    best, best_score = None, _ENOUGH
    for candidate in known:
        whole = SequenceMatcher(None, name, candidate).ratio()
        last = SequenceMatcher(None, own, candidate.rpartition(".")[2]).ratio()
        # Among equals of the last part, the section decides.
        score = max(whole, 0.9 * last + 0.1 * whole)
        if score > best_score:
            best, best_score = candidate, score
    return best
