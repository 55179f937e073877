"""Numbers as text: small plots, durations, time splits; pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.text import Text

_BLOCKS = "▁▂▃▄▅▆▇█"

PHASE_COLORS: Mapping[str, str] = {
    "startup": "bright_black",
    "warm-up": "blue",
    "generate": "cyan",
    "wait": "cyan",
    "train": "magenta",
    "publish": "yellow",
    "eval": "green",
    "other": "bright_black",
}
"""Color of each phase, by rich's names, the same wherever time is shown; unknown phases are white."""


def sparkline(values: Sequence[float], width: int) -> str:
    """The latest `width` values as blocks between their least and greatest; `?` where not finite."""
    recent = values[-width:]
    finite = [v for v in recent if math.isfinite(v)]
    if not finite:
        return "?" * len(recent)
    low, high = min(finite), max(finite)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((v - low) * scale)] if math.isfinite(v) else "?" for v in recent)


def shares(parts: Mapping[str, float], width: int) -> list[tuple[str, int]]:
    """Cells of a bar of `width` that each part of a whole gets, by largest remainder, so that they sum to `width`."""
    total = sum(parts.values())
    if total <= 0 or width <= 0:
        return []
    exact = {name: value * width / total for name, value in parts.items()}
    cells = {name: int(value) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: exact[name] - cells[name], reverse=True)
    for name in by_remainder[: width - sum(cells.values())]:
        cells[name] += 1
    return [(name, count) for name, count in cells.items() if count]


def duration(seconds: float) -> str:
    """`8.3 s`, `4 min 05 s`, `2 h 07 min`."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def time_split_text(phases: Mapping[str, float]) -> str:
    """`generate 62 %, train 30 %, other 8 %`: largest first, without phases under half a percent."""
    return ", ".join(f"{name} {share:.0%}".replace("%", " %") for name, _, share in _shown(phases))


def time_durations_text(phases: Mapping[str, float]) -> str:
    """`generate 2 min 30 s (62%), train 40.0 s (17%)`: largest first, without phases under half a percent."""
    return ", ".join(f"{name} {duration(seconds)} ({share:.0%})" for name, seconds, share in _shown(phases))


def time_bar(phases: Mapping[str, float], width: int) -> Text:
    """One bar of `width` cells, colored by phase."""
    return Text.assemble(*(("█" * cells, PHASE_COLORS.get(name, "white")) for name, cells in shares(phases, width)))


def time_legend(phases: Mapping[str, float], *, seconds: bool = False) -> Text:
    """The share of each phase beside its color, largest first, without phases under half a percent.

    `seconds` adds the duration of each phase.
    """
    legend = Text()
    for name, spent, share in _shown(phases):
        legend.append("■ ", style=PHASE_COLORS.get(name, "white"))
        legend.append(f"{name} {duration(spent)} ({share:.0%})  " if seconds else f"{name} {share:.0%}  ")
    return legend


def _shown(phases: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """(phase, seconds, share of the whole) of each phase of at least half a percent, largest first."""
    total = sum(phases.values())
    largest_first = sorted(phases.items(), key=lambda item: item[1], reverse=True)
    return [(name, spent, spent / total) for name, spent in largest_first if total > 0 and spent / total >= 0.005]


def labelled(rows: Sequence[tuple[str, Text]]) -> list[Text]:
    """Rows of a table whose right side is not cut or wrapped, so that paths can be copied from it."""
    width = max((len(name) for name, _ in rows), default=0)
    return [Text.assemble((f"{name:<{width}}  ", "dim"), text) for name, text in rows]
