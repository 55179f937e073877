"""What a person sees of a run while it lasts: a live table on a terminal, plain lines elsewhere.

Invariants
- No method waits for the terminal: they change the state, and a thread of the display draws it.
- A displayed wait comes from the registry of waits, so start-up shows what it waits for without being told.
- `stop` leaves the last state on the screen and gives the terminal back; it may be called again.
"""

from __future__ import annotations

import atexit
import io
import math
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncrl.observability.metrics import OTHER, phase_name
from asyncrl.observability.terminal import TerminalWriter
from asyncrl.observability.text_plots import duration, sparkline, time_bar, time_legend, time_split_text
from asyncrl.observability.waits import WAITS, Wait

_REFRESH_S = 0.25
_QUIET_S = 15.0
"""Plain output says what is going on when it has said nothing for so long."""
_ETA_STEPS = 10
"""Steps whose mean duration the estimate of the end is made from."""
_SHOWN_WAITS = 4
_PENDING_LINES = 10_000
"""Lines kept for a terminal that is paused; older ones are lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one finished step has to say."""

    step: int
    """Steps trained so far, this one included."""
    reward_mean: float
    response_length: float
    """Mean response length in tokens."""
    tokens_per_s: float
    """Response tokens per second of generation."""
    loss: float
    seconds: float
    """Wall time of the step."""
    time_split: Mapping[str, float]
    """Seconds by phase."""
    accuracy: float | None = None
    """Held-out accuracy, where this step was evaluated."""


class Display(Protocol):
    """Where the loop tells how far it is."""

    def start(self, total_steps: int | None) -> None:
        """Begins; `total_steps` is None where the number is not known yet."""

    def phase(self, name: str) -> None:
        """Says what the loop does now: `startup`, `generate`, `train`, ... or a phrase like `warm-up 40/200`."""

    def step(self, report: StepReport) -> None:
        """A step is finished."""

    def note(self, text: str) -> None:
        """One line worth keeping on the screen."""

    def stop(self) -> None:
        """Ends; idempotent."""


@dataclass(frozen=True, slots=True)
class DisplayState:
    """Everything that is shown; replaced as a whole, so that the drawing thread never sees half of a change."""

    started: float
    """Monotonic time."""
    total_steps: int | None = None
    phase: str = "startup"
    phase_since: float = 0.0
    rewards: tuple[float, ...] = ()
    step_seconds: tuple[float, ...] = ()
    time_split: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase since the start."""
    accuracy: float | None = None
    last: StepReport | None = None

    def after(self, report: StepReport) -> DisplayState:
        """The state once `report` is in."""
        split = dict(self.time_split)
        for name, seconds in report.time_split.items():
            split[name] = split.get(name, 0.0) + seconds
        return replace(
            self,
            rewards=(*self.rewards[-199:], report.reward_mean),
            step_seconds=(*self.step_seconds[1 - _ETA_STEPS :], report.seconds),
            time_split=split,
            accuracy=self.accuracy if report.accuracy is None else report.accuracy,
            last=report,
        )

    @property
    def steps_done(self) -> int:
        return 0 if self.last is None else self.last.step

    def remaining_s(self) -> float | None:
        """Estimated seconds to the end; None before the first step and where the number of steps is unknown."""
        if self.total_steps is None or not self.step_seconds:
            return None
        return max(0, self.total_steps - self.steps_done) * sum(self.step_seconds) / len(self.step_seconds)


def progress_text(state: DisplayState) -> str:
    """`step 3/40`, `step 3`."""
    return f"step {state.steps_done}" + ("" if state.total_steps is None else f"/{state.total_steps}")


def step_line(state: DisplayState, report: StepReport) -> str:
    """One finished step in one line."""
    parts = [
        f"{progress_text(state):<12}",
        f"reward {report.reward_mean:.3f}",
        f"length {report.response_length:.1f}",
        f"{report.tokens_per_s:.0f} tokens/s",
        f"loss {report.loss:+.4f}",
        f"{report.seconds:.1f} s ({time_split_text(report.time_split)})",
    ]
    if report.accuracy is not None:
        parts.append(f"accuracy {report.accuracy:.3f}")
    remaining = state.remaining_s()
    if remaining:
        parts.append(f"{duration(remaining)} left")
    return "  ".join(parts)


def _news() -> tuple[Wait, ...]:
    """Waits worth showing: supervision waits for exits without end, and that is no news."""
    return tuple(wait for wait in WAITS.snapshot() if math.isfinite(wait.deadline_s))


def idle_line(state: DisplayState, waits: tuple[Wait, ...], now: float) -> str:
    """What is going on, for when nothing was said for a while."""
    where = state.phase if state.last is None else f"{progress_text(state)}, {state.phase}"
    text = f"{where} for {duration(now - state.phase_since)}"
    return text + (f": waiting for {waits[0].describe(now)}" if waits else "")


def render(state: DisplayState, waits: tuple[Wait, ...], now: float) -> RenderableType:
    """The live table."""
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(style="dim", width=12)
    table.add_column(ratio=1)
    remaining = state.remaining_s()
    head = Table.grid(expand=True, padding=(0, 1))
    head.add_column()
    head.add_column(ratio=1)
    head.add_column(justify="right")
    head.add_row(
        Text(progress_text(state), style="bold"),
        ProgressBar(total=state.total_steps, completed=state.steps_done, pulse=state.total_steps is None),
        Text(duration(now - state.started) + ("" if remaining is None else f", {duration(remaining)} left")),
    )
    table.add_row("progress", head)
    if (report := state.last) is not None:
        reward = f"{report.reward_mean:.3f}"
        table.add_row("reward", Text.assemble((reward, "bold"), "  ", (sparkline(state.rewards, 40), "green")))
        if state.accuracy is not None:
            table.add_row("accuracy", f"{state.accuracy:.3f} on held-out prompts")
        table.add_row("response", f"{report.response_length:.1f} tokens, {report.tokens_per_s:.0f} tokens/s")
        table.add_row("loss", f"{report.loss:+.4f}")
    if state.time_split:
        table.add_row("time", Group(time_bar(state.time_split, 40), time_legend(state.time_split)))
    table.add_row("now", Text(f"{state.phase}, {duration(now - state.phase_since)}"))
    shown = waits if state.last is None else tuple(w for w in waits if w.age_s(now) >= 5.0)
    for i, wait in enumerate(shown[:_SHOWN_WAITS]):
        table.add_row("" if i else "waiting for", Text(wait.describe(now), style="yellow"))
    if len(shown) > _SHOWN_WAITS:
        table.add_row("", Text(f"and {len(shown) - _SHOWN_WAITS} more", style="dim"))
    return Panel(table, title="asyncrl", title_align="left", border_style="bright_black")


class _Drawn(ABC):
    """State and drawing thread that both displays share; a subclass says what to draw."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        now = time.monotonic()
        self._state = DisplayState(started=now, phase_since=now)

    def start(self, total_steps: int | None) -> None:
        with self._lock:
            self._state = replace(self._state, total_steps=total_steps)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="asyncrl-display", daemon=True)
            self._thread.start()

    def phase(self, name: str) -> None:
        with self._lock:
            if phase_name(name) != phase_name(self._state.phase):
                self._state = replace(self._state, phase_since=time.monotonic())
            self._state = replace(self._state, phase=name)

    def step(self, report: StepReport) -> None:
        with self._lock:
            self._state = self._state.after(report)

    def stop(self) -> None:
        if self._thread is not None and not self._stopped.is_set():
            self._stopped.set()
            self._thread.join(2.0)  # longer only where the terminal itself is stopped: then leave it

    @abstractmethod
    def _run(self) -> None:
        """The thread: draws until `_stopped` is set."""


class PlainDisplay(_Drawn):
    """One line per step, per change of phase before the first step, and per long silence."""

    def __init__(self, stream: TextIO, quiet_s: float = _QUIET_S) -> None:
        super().__init__()
        self._writer = TerminalWriter(lambda: stream)
        self._quiet_s = quiet_s
        self._said = time.monotonic()
        self._begun = ""

    def phase(self, name: str) -> None:
        super().phase(name)
        begun = phase_name(name)
        if self._state.last is None and begun not in (self._begun, OTHER):
            self._begun = begun
            self.note(name)

    def step(self, report: StepReport) -> None:
        super().step(report)
        self.note(step_line(self._state, report))

    def note(self, text: str) -> None:
        self._said = time.monotonic()
        self._writer.write(text + "\n")

    def stop(self) -> None:
        super().stop()
        self._writer.close()

    def _run(self) -> None:
        while not self._stopped.wait(min(1.0, self._quiet_s)):
            now = time.monotonic()
            if now - self._said >= self._quiet_s:
                self.note(idle_line(self._state, _news(), now))


class _LinesAbove(io.TextIOBase):
    """Stands in for stdout or stderr while the table is drawn: whole lines go to `put`, nothing waits."""

    def __init__(self, original: TextIO, put: Callable[[str], None]) -> None:
        self._original = original
        self._put = put
        self._lock = threading.Lock()
        self._rest = ""

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
            for line in lines:
                self._put(line)
        return len(text)

    def finish(self) -> None:
        """Hands on what was written after the last newline."""
        if self._rest:
            self.write("\n")

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._original.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._original.encoding


class LiveDisplay(_Drawn):
    """A table that is redrawn in place; what is written to stdout or stderr meanwhile scrolls by above it.

    Only the display's thread touches the terminal: rich lets two threads that print tear a table whose height changes.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._console = Console(file=stream, force_terminal=True)
        self._lines: deque[str] = deque(maxlen=_PENDING_LINES)
        self._redirected: dict[str, tuple[TextIO, _LinesAbove]] = {}

    def start(self, total_steps: int | None) -> None:
        if self._thread is None:
            for name in ("stdout", "stderr"):
                original: TextIO = getattr(sys, name)
                if original.isatty():  # what was sent to a file stays there
                    self._redirected[name] = (original, _LinesAbove(original, self._lines.append))
                    setattr(sys, name, self._redirected[name][1])
            atexit.register(self.stop)  # so that a traceback on the way out is shown
        super().start(total_steps)

    def note(self, text: str) -> None:
        if self._stopped.is_set():
            self._console.print(Text(text))
        else:
            self._lines.append(text)

    def stop(self) -> None:
        for name, (original, above) in self._redirected.items():
            if getattr(sys, name) is above:
                setattr(sys, name, original)
            above.finish()
        self._redirected = {}
        super().stop()
        atexit.unregister(self.stop)

    def _render(self) -> RenderableType:
        return render(self._state, _news(), time.monotonic())

    def _run(self) -> None:
        live = Live(
            console=self._console,
            auto_refresh=False,
            get_renderable=self._render,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        with suppress(OSError), live:  # the terminal may vanish; the job goes on
            while not self._stopped.wait(_REFRESH_S):
                self._draw(live)
            self._draw(live)

    def _draw(self, live: Live) -> None:
        lines = []
        while self._lines:
            lines.append(self._lines.popleft())
        if lines:
            self._console.print(Text.from_ansi("\n".join(lines)))
        live.refresh()


def make_display(mode: Literal["auto", "live", "plain"], stream: TextIO | None = None) -> Display:
    """The display for `mode`; auto is live where `stream` (default: stdout) is a terminal that can move its cursor."""
    stream = stream or sys.stdout
    if mode == "auto":
        mode = "live" if stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "") else "plain"
    return LiveDisplay(stream) if mode == "live" else PlainDisplay(stream)
