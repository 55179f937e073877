"""Which engine answers what cannot have been sampled so often, and so alone, that it should not serve. No I/O.

An engine that computes garbage is alive to every probe. Its answers are refused and asked for again, which costs its
share of the work. It is not trusted any more once `MOST` of its last `WINDOW` answers were malformed, while more than
half of the other engines have given `FEW` at most. Where all engines do it, the weights or the settings are at fault,
and a restart of engines would not help.
"""

from __future__ import annotations

from collections import deque

WINDOW = 64
MOST = 8
FEW = 1


class Trust:
    """The last answers of each engine, as far as it is known which engine gave them."""

    def __init__(self) -> None:
        self._malformed: dict[str, deque[bool]] = {}

    def believed(self, engine: str) -> None:
        """The engine gave an answer that can have been sampled."""
        self._note(engine, malformed=False)

    def malformed(self, engine: str) -> str | None:
        """The engine gave one that cannot. Returns why it is not trusted any more, or None; it then begins anew."""
        answers = self._note(engine, malformed=True)
        others = [sum(known) <= FEW for name, known in self._malformed.items() if name != engine]
        if sum(answers) < MOST or 2 * sum(others) <= len(others):
            return None
        del self._malformed[engine]
        return f"{sum(answers)} of its last {len(answers)} answers cannot have been sampled"

    def _note(self, engine: str, *, malformed: bool) -> deque[bool]:
        answers = self._malformed.setdefault(engine, deque(maxlen=WINDOW))
        answers.append(malformed)
        return answers
