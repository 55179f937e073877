"""The account of a run: its phases, steps and evaluations, and the summary at the end.

The recorder feeds the live display, metrics.jsonl, events.jsonl and summary.json. The stages of a run call `phase`,
`step` and `evaluated`, and never format a number.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.data.fleet import ACTOR, EngineState
from asyncrl.errors import RunDirectoryError
from asyncrl.observability.display import Display
from asyncrl.observability.events import EventLog, LoopStarted, StepFinished
from asyncrl.observability.metrics import MetricsLog, StepTimer
from asyncrl.observability.run_view import HeldOut, StepReport
from asyncrl.observability.summary import RunSummary, print_summary, write_curve, write_summary
from asyncrl.observability.text_plots import added
from asyncrl.run import interpreter
from asyncrl.run.account import Account

if TYPE_CHECKING:  # torch stays out of the driver until the engines are on their way
    from asyncrl.rollout.metrics import RolloutMetrics
    from asyncrl.weights.publication import PublicationReport


_SERVING = frozenset({EngineState.SERVING, EngineState.UPDATING, EngineState.OFFLOADED})
"""States of an engine that does its work. An engine is STOPPED only where somebody asked for that."""


class Recorder:
    """The account of one attempt of a run."""

    def __init__(self, *, display: Display, metrics: MetricsLog, events: EventLog) -> None:
        self._display = display
        self._metrics = metrics
        self._events = events
        self._timer = StepTimer(on_phase=display.phase)
        self._account = Account()
        self._earlier: Mapping[str, float] = {}
        """Seconds by phase of the steps before a resume."""
        self._held_out: HeldOut | None = None
        """The evaluation since the last step."""
        self._export: Path | None = None
        self._first = self._steps = 0
        self._engines: dict[str, str] = {}
        self._loop_began = False
        events.listen(self._watch_engines)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Counts the time of the body as phase `name`; `StepTimer` names those in use."""
        return self._timer.phase(name)

    def start(self, total_steps: int | None, first_step: int = 0) -> None:
        """Begins the steps `first_step` to `total_steps`; the time before this call was start-up."""
        self._first = self._steps = first_step
        self._display.start(total_steps)
        time = self._timer.finish_step()
        self._events.emit(LoopStarted(seconds=time.seconds, phases=dict(time.phases)))
        self._loop_began = True
        interpreter.settle()

    def continue_after(self, step: int) -> None:
        """Takes over the figures of the first `step` steps, which earlier attempts have trained; reads files."""
        for line in self._metrics.earlier(step):
            self._account.add(line["step"], line)
        self._earlier = dict(self._account.phases)

    def note(self, text: str) -> None:
        """Shows one line that stays on the screen."""
        self._display.note(text)

    def evaluated(self, step: int, accuracy: float | None, metrics: Mapping[str, float], skipped: str | None) -> None:
        """Adds a point of held-out accuracy after `step` steps; None where it was skipped, for reason `skipped`."""
        if accuracy is None:
            self._display.note(f"evaluation after step {step} skipped: {skipped}")
            return
        self._metrics.write(step, metrics)
        self._account.add(step, metrics)
        self._held_out = self._account.evaluations[step]
        self._display.note(f"held-out accuracy after step {step}: {self._held_out}")

    def exported(self, directory: Path) -> None:
        """Says that the final policy is in `directory`."""
        self._export = directory
        self._display.note(f"exported the policy to {directory}")

    @property
    def steps(self) -> int:
        """Steps trained so far."""
        return self._steps

    def step(
        self,
        step: int,
        rollout: RolloutMetrics,
        training: Mapping[str, float],
        publication: PublicationReport | None,
    ) -> None:
        """Ends step number `step` (from 1), whose batch is trained; None: its weights were not published."""
        time = self._timer.finish_step()
        published = {} if publication is None else publication.metrics()
        metrics = {**rollout.as_dict(), **training, **published, **time.metrics()}
        self._steps = step
        self._account.add(step, metrics, rollout.failure)
        silent = training.get("train/groups_without_signal")
        self._metrics.write(step, metrics)
        self._events.emit(
            StepFinished(step=step, seconds=time.seconds, version=None if publication is None else publication.version)
        )
        self._display.step(
            StepReport(
                step=step,
                reward_mean=rollout.reward_mean,
                response_length=rollout.response_tokens_mean,
                tokens_per_s=rollout.tokens_per_s,
                # GRPO's loss is near 0 whatever is learned; that of an algorithm that compares no rewards says all
                loss=training.get("train/loss") if silent is None else None,
                entropy=training.get("train/entropy"),
                grad_norm=training.get("train/grad_norm"),
                seconds=time.seconds,
                time_split=time.phases,
                held_out=self._held_out,
                groups=rollout.groups,
                groups_without_signal=None if silent is None else int(silent),
                samples=rollout.samples + rollout.failed_samples,
                failed_samples=rollout.failed_samples,
                dropped_groups=rollout.dropped_groups,
                failure=rollout.failure,
            )
        )
        self._held_out = None
        if self._account.silent_steps == 1 and silent == rollout.groups:
            self._display.note(
                f"step {step} learned nothing: within each of its {rollout.groups} groups all rewards are equal. Where "
                "that goes on, the task is too easy or too hard, or the reward does not tell samples apart"
            )

    def summary(self, outcome: str, model: Path) -> RunSummary:
        """The run up to now; `outcome` says how it ended."""
        totals, account, earlier = self._timer.totals(), self._account, self._earlier
        rewards = account.rewards
        steps = range(min(rewards, default=1), max(rewards, default=0) + 1)
        return RunSummary(
            seconds=totals.seconds + sum(earlier.values()),
            steps=self._steps,
            resumed_at=self._first or None,
            time_split=added(earlier, totals.phases),
            export=None if self._export is None else str(self._export),
            rewards=tuple(rewards.get(step, math.nan) for step in steps),
            rewards_from=steps.start,
            evaluations=tuple(sorted(account.evaluations.items())),
            outcome=outcome,
            facts={"model": os.path.abspath(model)} | account.facts(),
        )

    def _watch_engines(self, event: Mapping[str, Any]) -> None:
        """Tells the display how many engines serve, from the first step on."""
        if event["kind"] != "engine_state" or event.get("model", ACTOR) != ACTOR:
            return
        self._engines[event["engine"]] = event["state"]
        if self._loop_began:
            states = [state for state in self._engines.values() if state != EngineState.STOPPED]
            self._display.engines(sum(state in _SERVING for state in states), len(states))


def conclude_failure(recorder: Recorder, outcome: str, *, run_dir: Path, model: Path) -> None:
    """Writes the summary of a job that failed, where it has trained; prints nothing, since its error is what counts.

    The disk may be what failed, so a summary that cannot be written is left out.
    """
    if recorder.steps:
        with suppress(RunDirectoryError):
            write_summary(recorder.summary(outcome, model), run_dir)


def conclude(recorder: Recorder, outcome: str, *, run_dir: Path, model: Path) -> None:
    """Writes and prints the summary, then draws the reward curve. Call it after the event loop: it takes a second.

    The summary comes first, so that a process which is ended meanwhile has said how the run went.
    """
    summary = recorder.summary(outcome, model)
    print_summary(summary, sys.stdout, (write_summary(summary, run_dir),))
    curve = write_curve(summary, run_dir)
    if curve is not None:
        print(f"\nreward curve  {curve}", flush=True)
