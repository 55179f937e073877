"""The display of a running job: a live table on a terminal, plain lines elsewhere.

Invariants
- No method waits for the terminal. Methods change the state, and the display's own thread draws it.
- Displayed waits come from the registry of waits, so no caller has to announce what start-up waits for.
- `stop` leaves the last state on the screen and releases the terminal. It may be called again.
- A prompt (`breakpoint()`, `input`) has the terminal to itself: from then on a live display prints plain lines.
"""

from __future__ import annotations

import atexit
import builtins
import io
import math
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from asyncrl.observability.metrics import OTHER, phase_name
from asyncrl.observability.run_view import DisplayState, StepReport, engines_text, idle_line, render, step_line
from asyncrl.observability.terminal import TerminalWriter
from asyncrl.observability.waits import WAITS, Wait

_REFRESH_S = 0.25
_QUIET_S = 15.0
"""After so long without a line, plain output says what the job is doing."""
_PENDING_LINES = 10_000
"""Lines kept while the terminal is paused; the display drops older ones."""


class Display(Protocol):
    """Shows the progress that the loop reports."""

    def start(self, total_steps: int | None) -> None:
        """Starts the display; `total_steps` is None while the number of steps is unknown. May be called again."""

    def phase(self, name: str) -> None:
        """Shows what the loop does now: `startup`, `generate`, `train`, ... or text with a count (`warm-up 40/200`)."""

    def step(self, report: StepReport) -> None:
        """Shows a finished step."""

    def engines(self, serving: int, total: int) -> None:
        """Shows how many engines serve, while some do not and when all serve again."""

    def note(self, text: str) -> None:
        """Shows one line that stays on the screen."""

    def stop(self) -> None:
        """Stops the display; idempotent."""


def _shown_waits() -> tuple[Wait, ...]:
    """Waits to show: those with a deadline. Supervision waits for process exits all the time, which is no news."""
    return tuple(wait for wait in WAITS.snapshot() if math.isfinite(wait.deadline_s))


class _Drawn(ABC):
    """The state and the drawing thread that both displays share; a subclass draws."""

    def __init__(self, run_dir: Path | None) -> None:
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        now = time.monotonic()
        self._state = DisplayState(started=now, phase_since=now, run_dir="" if run_dir is None else str(run_dir))

    def start(self, total_steps: int | None) -> None:
        with self._lock:
            self._state = replace(self._state, total_steps=total_steps)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="asyncrl-display", daemon=True)
            self._thread.start()
            if self._state.run_dir:
                self.note(f"run directory: {self._state.run_dir}")

    def phase(self, name: str) -> None:
        with self._lock:
            if phase_name(name) != phase_name(self._state.phase):
                self._state = replace(self._state, phase_since=time.monotonic())
            self._state = replace(self._state, phase=name)

    def step(self, report: StepReport) -> None:
        with self._lock:
            self._state = self._state.after(report)

    def engines(self, serving: int, total: int) -> None:
        with self._lock:
            self._state = replace(self._state, engines=None if serving >= total else (serving, total))

    def stop(self) -> None:
        if self._thread is not None and not self._stopped.is_set():
            self._stopped.set()
            self._thread.join(2.0)  # it takes longer only if the terminal itself hangs: then leave the thread behind

    @abstractmethod
    def note(self, text: str) -> None: ...

    @abstractmethod
    def _run(self) -> None:
        """Draws until `_stopped` is set; runs in the display's thread."""


class PlainDisplay(_Drawn):
    """Prints one line per step, per change of phase before the first step, and after each long silence."""

    def __init__(self, stream: TextIO, quiet_s: float = _QUIET_S, run_dir: Path | None = None) -> None:
        super().__init__(run_dir)
        self._writer = TerminalWriter(lambda: stream)
        self._quiet_s = quiet_s
        self._said = time.monotonic()
        self._begun = ""

    def continue_from(self, state: DisplayState) -> None:
        """Goes on where another display was, without its lines about silence: somebody may be at a prompt."""
        self._state = state

    def phase(self, name: str) -> None:
        """Prints the phase when it begins, until the first step."""
        super().phase(name)
        begun = phase_name(name)
        if self._state.last is None and begun not in (self._begun, OTHER):
            self._begun = begun
            self.note(name)

    def step(self, report: StepReport) -> None:
        """Prints one line for the step."""
        super().step(report)
        self.note(step_line(self._state, report))

    def engines(self, serving: int, total: int) -> None:
        """Prints one line if the numbers changed."""
        before = self._state.engines
        super().engines(serving, total)
        if self._state.engines != before:
            self.note(engines_text(serving, total))

    def note(self, text: str) -> None:
        """Prints `text`."""
        self._said = time.monotonic()
        self._writer.write(text + "\n")

    def stop(self) -> None:
        """Stops the display after the lines so far are written."""
        super().stop()
        self._writer.close()

    def _run(self) -> None:
        while not self._stopped.wait(min(1.0, self._quiet_s)):
            now = time.monotonic()
            if now - self._said >= self._quiet_s:
                self.note(idle_line(self._state, _shown_waits(), now))


class _LinesAbove(io.TextIOBase):
    """Replaces stdout or stderr while the table is drawn: passes whole lines to `put` and never waits."""

    def __init__(self, original: TextIO, put: Callable[[str], None]) -> None:
        self._original = original
        self._put = put
        self._lock = threading.Lock()
        self._rest = ""
        self._finished = False

    def write(self, text: str) -> int:
        if self._finished:  # by a handler or a debugger that still holds this object
            self._original.write(text)
            self._original.flush()
            return len(text)
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
            for line in lines:
                self._put(line)
        return len(text)

    def finish(self) -> None:
        """Passes on the text after the last newline. What is written from now on goes to the original."""
        if self._rest:
            self.write("\n")
        self._finished = True

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._original.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._original.encoding


class LiveDisplay(_Drawn):
    """Redraws a table in place; lines that other code writes to stdout or stderr scroll by above it.

    Only the display's thread writes to the terminal: with rich, two threads that print tear a table whose height
    changes.
    """

    def __init__(self, stream: TextIO, run_dir: Path | None = None) -> None:
        super().__init__(run_dir)
        self._console = Console(file=stream, force_terminal=True)
        self._stream = stream
        self._lines: deque[str] = deque(maxlen=_PENDING_LINES)
        self._redirected: dict[str, tuple[TextIO, _LinesAbove]] = {}
        self._input = builtins.input
        self._plain: PlainDisplay | None = None
        """What prints instead, once somebody has asked for input."""

    def start(self, total_steps: int | None) -> None:
        """Redirects stdout and stderr if they are terminals, and starts drawing."""
        if self._thread is None:
            for name in ("stdout", "stderr"):
                original: TextIO = getattr(sys, name)
                if original.isatty():  # output that goes to a file is not redirected
                    self._redirected[name] = (original, _LinesAbove(original, self._lines.append))
                    setattr(sys, name, self._redirected[name][1])
            atexit.register(self.stop)  # otherwise a traceback at the exit would not be shown
            self._input, builtins.input = builtins.input, self._ask
        super().start(total_steps)

    def phase(self, name: str) -> None:
        """Shows the phase in the table; after an `input` as a PlainDisplay does."""
        super().phase(name)
        if self._plain is not None:
            self._plain.phase(name)

    def step(self, report: StepReport) -> None:
        """Shows the step, likewise."""
        super().step(report)
        if self._plain is not None:
            self._plain.step(report)

    def engines(self, serving: int, total: int) -> None:
        """Shows the numbers, likewise."""
        super().engines(serving, total)
        if self._plain is not None:
            self._plain.engines(serving, total)

    def note(self, text: str) -> None:
        """Prints `text` above the table, or below it once the display has stopped."""
        if self._plain is not None:
            self._plain.note(text)
        elif self._stopped.is_set():
            self._console.print(Text(text))
        else:
            self._lines.append(text)

    def stop(self) -> None:
        """Restores stdout and stderr and draws the last state."""
        for name, (original, above) in self._redirected.items():
            if getattr(sys, name) is above:
                setattr(sys, name, original)
            above.finish()
        self._redirected = {}
        super().stop()
        atexit.unregister(self.stop)
        if builtins.input == self._ask:
            builtins.input = self._input
        if self._plain is not None:
            self._plain.stop()

    def _ask(self, prompt: object = "") -> str:
        """In the place of `input`: a prompt would be drawn over."""
        self.stop()
        self._plain = PlainDisplay(self._stream)
        self._plain.continue_from(self._state)
        return self._input(prompt)

    def _render(self) -> RenderableType:
        return render(self._state, _shown_waits(), time.monotonic())

    def _run(self) -> None:
        live = Live(
            console=self._console,
            auto_refresh=False,
            get_renderable=self._render,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        with suppress(OSError), live:  # if the terminal vanishes, the job goes on
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


def make_display(
    mode: Literal["auto", "live", "plain"], stream: TextIO | None = None, run_dir: Path | None = None
) -> Display:
    """Makes the display for `mode`. `auto` is live if `stream` (default: stdout) is a terminal with a movable cursor.

    The display names `run_dir` first and keeps it in the title of the table.
    """
    stream = stream or sys.stdout
    if mode == "auto":
        mode = "live" if stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "") else "plain"
    return LiveDisplay(stream, run_dir) if mode == "live" else PlainDisplay(stream, run_dir=run_dir)
