"""The view of a run: a frozen state, and the lines and the table that show it. Pure; callers pass the time in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncrl.errors import counted
from asyncrl.observability.metrics import OTHER
from asyncrl.observability.text_plots import duration, figure, sparkline, time_bar, time_legend, time_split_text
from asyncrl.observability.waits import Wait

_ETA_STEPS = 10
"""Number of latest steps whose mean duration gives the estimated time to the end."""
_SHOWN_WAITS = 4
_SHOWN_FAILURE = 120
"""Characters of a failure that a line shows; events.jsonl has the whole text."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One point of the evaluation on held-out prompts. As text: `0.412`, `0.000, mean reward 0.352`."""

    accuracy: float
    reward: float | None
    """Mean reward; None if nothing tells."""

    @property
    def tells_more(self) -> bool:
        """Whether the mean reward says something that the accuracy does not: rewards are not only 0 and 1."""
        return self.reward is not None and self.reward != self.accuracy

    def __str__(self) -> str:
        return f"{self.accuracy:.3f}" + (f", mean reward {figure(self.reward or 0.0)}" if self.tells_more else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The figures of one finished step that the display shows."""

    step: int
    """Steps trained so far, including this one."""
    reward_mean: float
    """Mean reward over the samples of the batch."""
    response_length: float
    """Mean response length in tokens."""
    tokens_per_s: float
    """Response tokens per second of generation."""
    seconds: float
    """Wall time of the step."""
    time_split: Mapping[str, float]
    """Seconds by phase."""
    loss: float | None = None
    """Training loss; None where it says nothing about the progress."""
    entropy: float | None = None
    """Entropy of the policy in nat per token; None if it was not measured."""
    grad_norm: float | None = None
    """Norm of the gradient; None if no step was taken."""
    held_out: HeldOut | None = None
    """The evaluation since the step before; None if there was none."""
    groups: int = 0
    """Prompt groups in the batch."""
    groups_without_signal: int | None = None
    """Groups whose rewards are all equal, so they teach nothing; None if the algorithm does not compare rewards."""
    samples: int = 0
    """Samples of the batch, including failed ones."""
    failed_samples: int = 0
    """Samples whose generation or scoring failed."""
    dropped_groups: int = 0
    """Groups that had too few usable samples, so that others replaced them."""
    failure: str = ""
    """The most common failure; empty if there is none."""

    @property
    def signal(self) -> str:
        """`12/16 groups` have rewards that differ. Empty if the algorithm does not compare rewards."""
        if self.groups_without_signal is None:
            return ""
        return f"{self.groups - self.groups_without_signal}/{counted(self.groups, 'group')}"

    @property
    def progress(self) -> tuple[tuple[str, float], ...]:
        """What training tells of itself, by name: loss, entropy and gradient norm, as far as there are any."""
        figures = {"loss": self.loss, "entropy": self.entropy, "grad norm": self.grad_norm}
        return tuple((name, value) for name, value in figures.items() if value is not None)

    @property
    def failures(self) -> str:
        """`77 of 256 samples failed, 1 group replaced (why)`; empty if nothing failed."""
        parts = []
        if self.failed_samples:
            parts.append(f"{self.failed_samples} of {self.samples} samples failed")
        if self.dropped_groups:
            parts.append(counted(self.dropped_groups, "group") + " replaced")
        if not parts:
            return ""
        reason = self.failure if len(self.failure) <= _SHOWN_FAILURE else self.failure[: _SHOWN_FAILURE - 1] + "…"
        return ", ".join(parts) + (f" ({reason})" if reason else "")


@dataclass(frozen=True, slots=True)
class DisplayState:
    """Everything that the display shows. It is replaced as a whole, so the drawing thread never sees half a change."""

    started: float
    """Monotonic time of the start."""
    run_dir: str = ""
    """Run directory for the title; empty if there is none."""
    total_steps: int | None = None
    """Steps that the job is to train; None while unknown."""
    phase: str = "startup"
    """What the loop does now."""
    phase_since: float = 0.0
    """Monotonic time at which the phase began."""
    rewards: tuple[float, ...] = ()
    """Mean rewards of the latest 200 steps."""
    step_seconds: tuple[float, ...] = ()
    """Durations of the latest 10 steps."""
    time_split: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase over all finished steps."""
    held_out: HeldOut | None = None
    """Latest evaluation; None before the first."""
    last: StepReport | None = None
    """Latest finished step; None before the first."""
    engines: tuple[int, int] | None = None
    """(engines that serve, all engines); None while all serve."""

    def after(self, report: StepReport) -> DisplayState:
        """Returns the state after a further step."""
        split = dict(self.time_split)
        for name, seconds in report.time_split.items():
            split[name] = split.get(name, 0.0) + seconds
        return replace(
            self,
            rewards=(*self.rewards[-199:], report.reward_mean),
            step_seconds=(*self.step_seconds[1 - _ETA_STEPS :], report.seconds),
            time_split=split,
            held_out=report.held_out or self.held_out,
            last=report,
        )

    @property
    def steps_done(self) -> int:
        """Steps trained so far."""
        return 0 if self.last is None else self.last.step

    def remaining_s(self) -> float | None:
        """Returns the estimated seconds to the end; None before the first step or if the number of steps is unknown."""
        if self.total_steps is None or not self.step_seconds:
            return None
        return max(0, self.total_steps - self.steps_done) * sum(self.step_seconds) / len(self.step_seconds)


def progress_text(state: DisplayState) -> str:
    """`step 3/40`, `step 3`."""
    return f"step {state.steps_done}" + ("" if state.total_steps is None else f"/{state.total_steps}")


def step_line(state: DisplayState, report: StepReport) -> str:
    """Describes one finished step in one line."""
    parts = [
        f"{progress_text(state):<12}",
        f"reward {figure(report.reward_mean)}",
        *([f"signal {report.signal}"] if report.signal else []),
        f"length {report.response_length:.1f}",
        f"{report.tokens_per_s:.0f} tokens/s",
        *(f"{name} {figure(value)}" for name, value in report.progress),
        f"{report.seconds:.1f} s ({time_split_text(report.time_split)})",
    ]
    if report.held_out is not None:
        parts.append(f"accuracy {report.held_out}")
    remaining = state.remaining_s()
    if remaining:
        parts.append(f"{duration(remaining)} left")
    if report.failures:
        parts.append(report.failures)
    return "  ".join(parts)


def idle_line(state: DisplayState, waits: tuple[Wait, ...], now: float) -> str:
    """Says what the job is doing, after a long silence: phase, its duration, and the oldest wait."""
    phase = "between phases" if state.phase == OTHER else state.phase
    where = phase if state.last is None else f"{progress_text(state)}, {phase}"
    text = f"{where} for {duration(now - state.phase_since)}"
    return text + (f": waiting for {waits[0].describe(now)}" if waits else "")


def engines_text(serving: int, total: int) -> str:
    """`1 of 2 engines serve`, `all 2 engines serve`."""
    if total == 1:
        return "the engine serves" if serving else "the engine does not serve"
    return f"all {total} engines serve" if serving >= total else f"{serving} of {total} engines serve"


def render(state: DisplayState, waits: tuple[Wait, ...], now: float) -> RenderableType:
    """Draws the live table."""
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(style="dim", width=12)
    table.add_column(ratio=1)
    remaining = state.remaining_s()
    head = Table.grid(expand=True, padding=(0, 1))
    head.add_column()
    head.add_column(ratio=1)
    head.add_row(
        Text(progress_text(state), style="bold"),
        ProgressBar(total=state.total_steps, completed=state.steps_done, pulse=state.total_steps is None),
    )
    table.add_row("progress", head)
    elapsed = duration(now - state.started)
    table.add_row("elapsed", Text(elapsed + ("" if remaining is None else f", {duration(remaining)} left")))
    if state.engines is not None:
        table.add_row("engines", Text(engines_text(*state.engines), style="yellow"))
    if (report := state.last) is not None:
        reward = figure(report.reward_mean)
        table.add_row("reward", Text.assemble((reward, "bold"), "  ", (sparkline(state.rewards, 40), "green")))
        if report.signal:
            style = "yellow" if report.groups_without_signal == report.groups else ""
            table.add_row("signal", Text(f"{report.signal} have rewards that differ", style=style))
        if report.failures:
            table.add_row("failed", Text(report.failures, style="yellow"))
        if state.held_out is not None:
            table.add_row("accuracy", f"{state.held_out} on held-out prompts")
        table.add_row("response", f"{report.response_length:.1f} tokens, {report.tokens_per_s:.0f} tokens/s")
        if report.progress:
            table.add_row("training", ", ".join(f"{name} {figure(value)}" for name, value in report.progress))
    if state.time_split:
        table.add_row("time", Group(time_bar(state.time_split, 40), time_legend(state.time_split)))
    table.add_row("now", Text(f"{state.phase}, {duration(now - state.phase_since)}"))
    shown = waits if state.last is None else tuple(w for w in waits if w.age_s(now) >= 5.0)
    for i, wait in enumerate(shown[:_SHOWN_WAITS]):
        table.add_row("" if i else "waiting for", Text(wait.describe(now), style="yellow"))
    if len(shown) > _SHOWN_WAITS:
        table.add_row("", Text(f"and {len(shown) - _SHOWN_WAITS} more", style="dim"))
    title = Text(f"asyncrl  {state.run_dir}".strip())
    return Panel(table, title=title, title_align="left", border_style="bright_black")
