"""Numbers as text: small plots, durations, time splits. Pure functions."""

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
"""Color of each phase, as a rich color name, the same in all output. Unknown phases are white."""


def figure(value: float, digits: int = 3) -> str:
    """`value` with `digits` decimals; as a power of ten where that would show no figure or a dozen digits.

    `0.250`, `-3.000`, `4.9e+29`, `2.5e-06`, `nan`.
    """
    if not math.isfinite(value) or value == 0 or 10.0**-digits <= abs(value) < 1e6:
        return f"{value:.{digits}f}"
    return f"{value:.2g}"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draws the latest `width` values as blocks between their minimum and maximum; `?` for one that is not finite."""
    recent = values[-width:]
    finite = [v for v in recent if math.isfinite(v)]
    if not finite:
        return "?" * len(recent)
    low, high = min(finite), max(finite)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((v - low) * scale)] if math.isfinite(v) else "?" for v in recent)


def shares(parts: Mapping[str, float], width: int) -> list[tuple[str, int]]:
    """Divides a bar of `width` cells among `parts`, by largest remainder, so that the cells add up to `width`.

    Returns (name, cells) for each part with at least one cell; nothing if the parts add up to 0.
    """
    total = sum(parts.values())
    if total <= 0 or width <= 0:
        return []
    exact = {name: value * width / total for name, value in parts.items()}
    cells = {name: int(value) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: exact[name] - cells[name], reverse=True)
    for name in by_remainder[: width - sum(cells.values())]:
        cells[name] += 1
    return [(name, count) for name, count in cells.items() if count]


def size(size_bytes: float) -> str:
    """Formats a size: `812 bytes`, `5.3 MB`, `1.2 TB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(size_bytes) < 999.5:
            return f"{size_bytes:.0f} {unit}" if unit == "bytes" else f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} TB"


def duration(seconds: float) -> str:
    """Formats a duration: `8.3 s`, `4 min 05 s`, `2 h 07 min`; `unknown` if it is not finite."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def added(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """The sum of two time splits."""
    return {name: first.get(name, 0.0) + second.get(name, 0.0) for name in {**first, **second}}


def time_split_text(phases: Mapping[str, float]) -> str:
    """Formats a time split: `generate 62 %, train 30 %`. Largest phase first, without phases under half a percent."""
    return ", ".join(f"{name} {share:.0%}".replace("%", " %") for name, _, share in _shown(phases))


def time_durations_text(phases: Mapping[str, float]) -> str:
    """Formats a time split with durations: `generate 2 min 30 s (62%), train 40.0 s (17%)`, else as above."""
    return ", ".join(f"{name} {duration(seconds)} ({share:.0%})" for name, seconds, share in _shown(phases))


def time_bar(phases: Mapping[str, float], width: int) -> Text:
    """Draws a time split as one bar of `width` cells, colored by phase."""
    return Text.assemble(*(("█" * cells, PHASE_COLORS.get(name, "white")) for name, cells in shares(phases, width)))


def time_legend(phases: Mapping[str, float], *, seconds: bool = False) -> Text:
    """Lists the share of each phase beside its color, largest first, without phases under half a percent.

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
    """Lays out (name, text) rows. The text is neither cut nor wrapped, so that the user can copy paths from it."""
    width = max((len(name) for name, _ in rows), default=0)
    return [Text.assemble((f"{name:<{width}}  ", "dim"), text) for name, text in rows]
