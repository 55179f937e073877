"""The reward curve of a run: in characters for the terminal, as a PNG for the run directory.

Each plotting library takes about half a second to import, so functions import them when they need them. Call these
functions in a thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.errors import counted
from asyncrl.observability.text_plots import figure as number

_BLUE, _RED, _GREY = "#2a6fbb", "#c8452f", "#8a8a8a"


@dataclass(frozen=True, slots=True)
class Points:
    """Held-out values over steps."""

    what: str
    """`held-out accuracy`."""
    values: tuple[tuple[int, float], ...]
    """(steps trained, value)."""


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Returns, for each value, the mean of the finite ones among the last `window` values; NaN if there is none."""
    means = []
    for end in range(1, len(values) + 1):
        recent = [v for v in values[max(0, end - window) : end] if math.isfinite(v)]
        means.append(sum(recent) / len(recent) if recent else math.nan)
    return means


def smoothing_window(steps: int) -> int:
    """Window of the moving mean: a tenth of the steps, at least 3 and at most 50."""
    return max(3, min(50, round(steps / 10)))


def curve_text(rewards: Sequence[float], *, width: int = 80, height: int = 15, first: int = 1) -> str:
    """Draws the moving mean of the reward over steps, the first of which is `first`, in characters without color.

    Returns "" for fewer than two finite points. A reward that never changed becomes a sentence, because a plot would
    invent a range for it.
    """
    smooth = moving_mean(rewards, smoothing_window(len(rewards)))
    points = [(step, value) for step, value in enumerate(smooth, first) if math.isfinite(value)]
    if len(points) < 2:
        return ""
    if len({value for _, value in points}) == 1:
        return f"mean reward {number(points[0][1])} at each of {len(rewards)} steps"
    from plotext import figure, uncolorize

    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, height)
    steps, values = zip(*points, strict=True)
    figure.draw(figure.signal(list(steps), list(values), marker="braille").lines())
    count = min(9, len(steps))
    ticks = sorted({steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)})
    figure.ruler("x").ticks(ticks, [str(t) for t in ticks])
    figure.title(f"mean reward, moving mean of {counted(smoothing_window(len(rewards)), 'step')}")
    figure.label("step", "x")
    text: str = uncolorize(str(figure.build()))
    figure.clear()
    return "\n".join(line.rstrip() for line in text.splitlines())


def write_curve_png(
    path: Path, rewards: Sequence[float], held_out: Points, *, first: int = 1, title: str = "Reward curve"
) -> None:
    """Draws the mean reward of each step from `first` on, its moving mean, and the held-out points if there are any.

    Raises OSError when `path` cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = range(first, first + len(rewards))
    window = smoothing_window(len(rewards))
    axes.plot(steps, rewards, "o-", color=_BLUE, alpha=0.35, linewidth=0.8, markersize=3, label="mean reward of a step")
    if len(rewards) > window:
        label = f"moving mean, {window} steps"
        axes.plot(steps, moving_mean(rewards, window), color=_BLUE, linewidth=2.2, label=label)
    if held_out.values:
        at, values = zip(*held_out.values, strict=True)
        axes.plot(at, values, "D:", color=_RED, linewidth=1.2, markersize=6, label=held_out.what)
        for step, value in (held_out.values[0], held_out.values[-1]):
            axes.annotate(
                number(value), (step, value), xytext=(0, 9), textcoords="offset points", ha="center", color=_RED
            )
        axes.set_ylabel(f"mean reward, {held_out.what}")
    else:
        axes.set_ylabel("mean reward")
    axes.set_xlabel("training step")
    axes.set_title(title, loc="left", fontweight="bold")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.margins(x=0.04, y=0.12)
    axes.grid(True, color=_GREY, alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="best", frameon=False)
    figure.savefig(path)
