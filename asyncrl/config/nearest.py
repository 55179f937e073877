"""The valid names that a user most likely meant with a misspelled one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

_ENOUGH = 0.75  # similarity in [0, 1] under which a suggestion would mislead
_EQUALLY = 0.03  # names this close to the best are meant as likely
_AT_MOST = 3


def nearest(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """The most similar of `known`, best first: none when none is similar, several when they are equally likely.

    A dotted name is compared by its last part and, with less weight, by its section. So a key in the wrong section
    (`train.temperature`) or in none (`lr`) is found, and is not taken for another key of the section that it stands in.
    """
    scores = {candidate: _similarity(name, candidate) for candidate in known}
    best = max(scores.values(), default=0.0)
    if best < _ENOUGH:
        return ()
    home = max(scores, key=scores.__getitem__).rpartition(".")[2]
    likely = [c for c, score in scores.items() if score >= best - _EQUALLY and c.rpartition(".")[2] == home]
    return tuple(sorted(likely, key=lambda candidate: -scores[candidate])[:_AT_MOST])


def did_you_mean(names: Iterable[str]) -> str:
    """`; did you mean a or b?`; empty without names."""
    listed = " or ".join(names)
    return f"; did you mean {listed}?" if listed else ""


def _similarity(name: str, candidate: str) -> float:
    section, _, key = name.rpartition(".")
    home, _, other = candidate.rpartition(".")
    alike = SequenceMatcher(None, section, home).ratio() if section else 1.0
    return 0.75 * SequenceMatcher(None, key, other).ratio() + 0.25 * alike
