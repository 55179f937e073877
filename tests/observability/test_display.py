from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blockbuster import BlockBuster
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from asyncrl.observability.display import LiveDisplay, PlainDisplay, make_display
from asyncrl.observability.run_view import DisplayState, HeldOut, StepReport, idle_line, render, step_line
from asyncrl.observability.text_plots import duration, shares, size, sparkline, time_split_text
from asyncrl.observability.waits import WAITS, Wait


def a_step(step: int, **changes: Any) -> StepReport:
    values = {"reward_mean": 0.5, "response_length": 20.25, "tokens_per_s": 812.0, "loss": -0.0123, "seconds": 2.0}
    values |= changes
    return StepReport(step=step, time_split={"generate": 1.25, "train": 0.5, "other": 0.25}, **values)


def shown(state: DisplayState, waits: tuple[Wait, ...] = (), now: float = 60.0, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render(state, waits, now))
    text = console.file
    assert isinstance(text, io.StringIO)
    return text.getvalue()


def test_the_live_table_shows_what_start_up_waits_for() -> None:
    state = DisplayState(started=0.0, total_steps=40)
    text = shown(state, (Wait("first generation", "engine-0", 48.0, 600.0),))
    assert "step 0/40" in text
    assert "startup, 1 min 00 s" in text
    assert "first generation from engine-0, 12.0 s of 600 s" in text


def test_the_live_table_shows_a_step_and_where_the_time_goes() -> None:
    state = DisplayState(started=0.0, total_steps=40, phase="train")
    for i in range(1, 5):
        state = state.after(a_step(i, reward_mean=i / 10))
    text = shown(state, now=10.0)
    assert "step 4/40" in text
    assert "10.0 s, 1 min 12 s left" in text  # 36 steps of 2 s
    assert "0.400  ▁▃▆█" in text
    assert "20.2 tokens, 812 tokens/s" in text
    assert re.search(r"generate 62%.*train 25%.*other 12%", text)
    assert "accuracy" not in text


def test_accuracy_stays_on_the_screen_after_its_step() -> None:
    state = DisplayState(started=0.0).after(a_step(1, held_out=HeldOut(0.75, 0.75))).after(a_step(2))
    assert "0.750 on held-out prompts" in shown(state)
    graded = DisplayState(started=0.0).after(a_step(1, held_out=HeldOut(0.0, 0.412)))
    assert "0.000, mean reward 0.412 on held-out prompts" in shown(graded)


def test_short_waits_of_a_running_loop_are_not_shown() -> None:
    state = DisplayState(started=0.0).after(a_step(1))
    waits = (Wait("response", "router", 10.0, 600.0), Wait("response", "engine-1", 58.0, 600.0))
    assert "router" in shown(state, waits) and "engine-1" not in shown(state, waits)


def test_many_waits_are_counted() -> None:
    waits = tuple(Wait("response", f"engine-{i}", 0.0, 600.0) for i in range(30))
    assert "and 26 more" in shown(DisplayState(started=0.0), waits)


def test_a_step_in_a_line() -> None:
    state = DisplayState(started=0.0, total_steps=3).after(a_step(1, held_out=HeldOut(0.5, None)))
    assert state.last is not None
    assert step_line(state, state.last) == (
        "step 1/3      reward 0.500  length 20.2  812 tokens/s  loss -0.012  "
        "2.0 s (generate 62 %, train 25 %, other 12 %)  accuracy 0.500  4.0 s left"
    )


def test_a_step_of_grpo_shows_entropy_and_gradient_norm() -> None:
    report = a_step(1, loss=None, entropy=1.234, grad_norm=3.2e-5, reward_mean=4.9e29)
    line = step_line(DisplayState(started=0.0), report)
    assert "reward 4.9e+29  " in line and "entropy 1.234  grad norm 3.2e-05" in line and "loss" not in line
    assert "entropy 1.234, grad norm 3.2e-05" in shown(DisplayState(started=0.0).after(report))


def test_what_failed_and_what_teaches_nothing_is_seen_in_line_and_table() -> None:
    reason = "ValueError: no number in the response (my_rewards.py:7 in score)"
    report = a_step(
        1, groups=16, groups_without_signal=4, samples=256, failed_samples=77, dropped_groups=1, failure=reason
    )
    state = DisplayState(started=0.0, total_steps=3).after(report)
    assert "signal 12/16 groups" in step_line(state, report)
    assert f"77 of 256 samples failed, 1 group replaced ({reason})" in step_line(state, report)
    table = shown(state, width=160)
    assert "12/16 groups have rewards that differ" in table and f"1 group replaced ({reason})" in table
    healthy = a_step(2)
    assert not re.search("signal|failed|replaced", step_line(state, healthy) + shown(state.after(healthy)))


@pytest.mark.parametrize("width", [40, 60])
def test_a_narrow_terminal_shows_the_bar_and_the_time_left_whole(width: int) -> None:
    state = DisplayState(started=0.0, total_steps=1000).after(a_step(345, seconds=0.1))
    lines = shown(state, width=width).splitlines()
    assert any("step 345/1000" in line and "━" in line for line in lines)
    assert any("1 min 00 s, 1 min 06 s" in line for line in lines)


def test_engines_that_do_not_serve_are_seen_until_all_do() -> None:
    stream = io.StringIO()
    display = plain(stream)
    for serving in (2, 1, 1, 2, 2):
        display.engines(serving, 2)
    display.stop()
    assert stream.getvalue().splitlines() == ["1 of 2 engines serve", "all 2 engines serve"]
    assert "1 of 2 engines serve" in shown(DisplayState(started=0.0, engines=(1, 2)))
    assert "engines" not in shown(DisplayState(started=0.0))


def test_the_run_directory_is_named_first_and_once() -> None:
    stream = io.StringIO()
    display = make_display("plain", stream, Path("runs/demo-2"))
    for total in (None, 60):
        display.start(total)
    display.note("next")
    display.stop()
    assert stream.getvalue().splitlines() == ["run directory: runs/demo-2", "next"]
    assert "asyncrl  runs/demo-2" in shown(DisplayState(started=0.0, run_dir="runs/demo-2")).splitlines()[0]


def test_nothing_that_is_not_finite_breaks_a_display() -> None:
    nan = float("nan")
    report = a_step(1, reward_mean=nan, loss=float("inf"), tokens_per_s=nan, seconds=nan)
    state = DisplayState(started=0.0, total_steps=9).after(report).after(a_step(2))
    assert "reward nan" in step_line(state, report)
    assert "step 2/9" in shown(state)


def test_silence_is_broken_with_what_goes_on() -> None:
    state = DisplayState(started=0.0, phase="startup", phase_since=0.0)
    wait = Wait("first generation", "engine-0", 48.0, 600.0)
    assert idle_line(state, (wait,), 60.0) == (
        "startup for 1 min 00 s: waiting for first generation from engine-0, 12.0 s of 600 s"
    )
    assert idle_line(state.after(a_step(3)), (), 60.0) == "step 3, startup for 1 min 00 s"
    assert idle_line(replace(state, phase="other"), (), 60.0) == "between phases for 1 min 00 s"


def plain(stream: io.StringIO, quiet_s: float = 60.0) -> PlainDisplay:
    display = PlainDisplay(stream, quiet_s)
    display.start(3)
    return display


def test_plain_output_is_one_line_per_step_and_per_phase_of_the_start() -> None:
    stream = io.StringIO()
    display = plain(stream)
    display.phase("starting engines")
    for i in range(1, 4):
        display.phase(f"warm-up {i}/200")
        display.phase("warm-up")
        display.phase("other")
    for i in (1, 2):
        display.phase("generate")
        display.step(a_step(i))
        display.phase("train")
    display.note("stopping: SIGTERM")
    display.stop()
    display.stop()
    begins = [re.split(r"\s{2,}", line)[0] for line in stream.getvalue().splitlines()]
    assert begins == ["starting engines", "warm-up 1/200", "generate", "step 1/3", "step 2/3", "stopping: SIGTERM"]


def test_plain_output_says_what_it_waits_for_when_nothing_else_was_said() -> None:
    stream = io.StringIO()
    display = plain(stream, quiet_s=0.02)
    with WAITS.register("first generation", "engine-0", 600.0):
        deadline = time.monotonic() + 5
        while "waiting for" not in stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    display.stop()
    said = r"^startup for \d+\.\d s: waiting for first generation from engine-0, \d+\.\d s of 600 s$"
    assert re.search(said, stream.getvalue(), re.MULTILINE)


@pytest.mark.parametrize("mode", ["plain", "live"])
@pytest.mark.anyio
async def test_a_display_never_blocks_the_event_loop(mode: str, no_blocking: BlockBuster) -> None:
    no_blocking.deactivate()
    paused = PausedTerminal()
    display = make_display(mode, paused)  # type: ignore[arg-type]
    display.start(100)
    if mode == "live":
        assert paused.reached.wait(5)  # the display's thread is stuck in the terminal
    no_blocking.activate()
    started = time.monotonic()
    for i in range(1, 1000):
        display.phase("generate")
        display.step(a_step(i))
        display.note("a note")
    took = time.monotonic() - started
    no_blocking.deactivate()
    paused.resumed.set()
    display.stop()
    assert took < 10.0
    assert paused.getvalue().count("a note") == 999


class PausedTerminal(io.StringIO):
    """A terminal whose user has paused the output."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()
        self.resumed = threading.Event()

    def write(self, text: str) -> int:
        self.reached.set()
        self.resumed.wait(20)
        return super().write(text)


def test_auto_is_plain_where_output_is_not_a_terminal() -> None:
    display = make_display("auto", io.StringIO())
    assert isinstance(display, PlainDisplay)
    display.stop()
    assert isinstance(make_display("live", io.StringIO()), LiveDisplay)


def test_a_note_after_the_end_is_still_shown() -> None:
    stream = io.StringIO()
    display = LiveDisplay(stream)
    display.start(1)
    display.stop()
    display.note("summary written")
    assert stream.getvalue().rstrip().endswith("summary written")


SESSION = """
import logging, sys, time
from asyncrl.observability.display import LiveDisplay, make_display
from asyncrl.observability.run_view import StepReport
from asyncrl.observability.logging import get_logger, logging_to

with logging_to(None) as log:
    display = make_display("auto")
    assert isinstance(display, LiveDisplay)
    display.start(30)
    for i in range(1, 31):
        get_logger("controller").info(f"log line {i}.")
        print(f"printed line {i}.")
        display.note(f"note line {i}.")
        display.step(StepReport(step=i, reward_mean=i / 30, response_length=9, tokens_per_s=80, loss=0.0, seconds=0.02,
                                time_split={"generate": 0.02}))
        time.sleep(0.02)
        give_up = time.monotonic() + 20
        while i in (10, 20) and display._lines and time.monotonic() < give_up:  # drawing the table prints them
            time.sleep(0.01)
    log.flush(20)  # as the driver does: the writer's thread may be late
    display.stop()
"""


def screen_after(output: str) -> list[str]:
    """Returns the lines that a terminal (wide and high enough) shows after `output`."""
    lines, row, column = [""], 0, 0
    for match in re.finditer(r"\x1b\[\??([0-9;]*)([A-Za-z])|\r|\n|[^\x1b\r\n]+", output):
        text, number, command = match[0], match[1], match[2]
        if text == "\r":
            column = 0
        elif text == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif command == "A":
            row -= int(number or 1)
        elif command == "K":
            lines[row] = ""
        elif command is None:
            lines[row] = lines[row][:column].ljust(column) + text + lines[row][column + len(text) :]
            column += len(text)
        else:
            assert command in "mhl", f"this small terminal does not know the sequence {text!r}"
    return lines


def test_log_lines_do_not_tear_the_live_table(tmp_path: Path) -> None:
    master, slave = os.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "90", "LINES": "200"}
    command = [sys.executable, "-c", SESSION]
    with subprocess.Popen(command, stdout=slave, stderr=slave, stdin=slave, env=environment) as process:
        os.close(slave)
        chunks = []
        try:
            while chunk := os.read(master, 65536):
                chunks.append(chunk)
        except OSError:  # EIO: the process has closed its side
            pass
    os.close(master)
    assert process.returncode == 0
    output = b"".join(chunks).decode()
    assert set(re.findall(r"step (\d+)/30", output)) - {"0", "30"}, "the table must be drawn while lines are printed"
    screen = screen_after(output)
    for kind in ("log", "printed", "note"):
        seen = [int(m[1]) for line in screen if (m := re.search(rf"{kind} line (\d+)\.\s*$", line))]
        assert seen == list(range(1, 31)), kind
    table = [line for line in screen if line.startswith(("╭", "│", "╰"))]
    assert sum("step 30/30" in line for line in table) == 1
    assert (table[0][0], table[-1][0]) == ("╭", "╰") and len({len(line) for line in table}) == 1
    assert [line for line in screen if line.strip()][-1].startswith("╰")


PROMPT = """
import pdb, sys, time
from asyncrl.observability.display import make_display
from asyncrl.observability.run_view import StepReport

def a_step(number):
    return StepReport(step=number, reward_mean=0.5, response_length=9, tokens_per_s=80, seconds=1.0, time_split={})

display = make_display("live")
display.start(3)
held = sys.stdout
display.step(a_step(1))
time.sleep(0.5)
secret = 41
%s
secret += 1
display.step(a_step(2))
print(f"went on with {secret}", file=held)
display.stop()
"""


@pytest.mark.parametrize(
    ("ask", "prompt"),
    [
        ("breakpoint()", "(Pdb) "),
        ("pdb.set_trace()", "(Pdb) "),
        ("while input('(Ask) ') != 'c': print(secret)", "(Ask) "),
    ],
)
def test_a_prompt_under_the_live_table_is_seen_and_nothing_draws_over_it(ask: str, prompt: str) -> None:
    master, slave = os.openpty()
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONBREAKPOINT"}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "90", "LINES": "200"}
    with subprocess.Popen(
        [sys.executable, "-c", PROMPT % ask], stdout=slave, stderr=slave, stdin=slave, env=environment
    ) as process:
        os.close(slave)
        output = b""
        try:
            while prompt.encode() not in output:
                output += os.read(master, 65536)
            time.sleep(1.0)  # a table that was still drawn would be drawn here
            os.write(master, b"p secret\n")
            while output.count(prompt.encode()) < 2:
                output += os.read(master, 65536)
            os.write(master, b"c\n")
            while chunk := os.read(master, 65536):
                output += chunk
        except OSError:  # EIO: the process has closed its side
            pass
    os.close(master)
    assert process.returncode == 0
    before, asked, after = output.decode().split(prompt)
    assert "step 1/3" in before and "41" in asked and "\x1b" not in asked
    assert "step 2/3      reward 0.500" in after and "went on with 42" in after


def test_a_sparkline_spans_its_least_and_greatest() -> None:
    assert sparkline([0.0, 0.5, 1.0], 10) == "▁▅█"
    assert sparkline([0.0, float("nan"), 1.0], 10) == "▁?█"
    assert sparkline([9.0, 1.0, 2.0], 2) == "▁█"
    assert sparkline([3.0, 3.0], 5) == "▁▁"
    assert sparkline([], 5) == ""


@given(st.dictionaries(st.text(min_size=1), st.floats(0, 1e6), max_size=6), st.integers(0, 60))
def test_the_cells_of_a_bar_fill_it(parts: dict[str, float], width: int) -> None:
    cells = dict(shares(parts, width))
    assert sum(cells.values()) == (width if sum(parts.values()) > 0 else 0)
    assert all(count > 0 for count in cells.values())


@pytest.mark.parametrize(
    ("seconds", "text"), [(8.26, "8.3 s"), (245, "4 min 05 s"), (7620, "2 h 07 min"), (float("inf"), "unknown")]
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (5_300_000, "5.3 MB"), (999_900, "1 MB"), (2.5e9, "2.5 GB"), (3e13, "30 TB")],
)
def test_sizes_read_well(size_bytes: float, text: str) -> None:
    assert size(size_bytes) == text


def test_a_time_split_names_the_largest_first() -> None:
    assert time_split_text({"train": 30, "generate": 69.8, "other": 0.2}) == "generate 70 %, train 30 %"
    assert time_split_text({}) == ""
