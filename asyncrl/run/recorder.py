"""The account of a run: its phases, steps and evaluations, and the summary at the end.

The recorder feeds the live display, metrics.jsonl, events.jsonl and summary.json. The stages of a run call `phase`,
`step` and `evaluated`, and never format a number.
"""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.data.fleet import ACTOR, EngineState
from asyncrl.observability.display import Display
from asyncrl.observability.events import EventLog, LoopStarted, StepFinished
from asyncrl.observability.metrics import MetricsLog, StepTimer
from asyncrl.observability.run_view import StepReport
from asyncrl.observability.summary import RunSummary, print_summary, write_curve, write_summary
from asyncrl.run import interpreter

if TYPE_CHECKING:  # torch stays out of the driver until the engines are on their way
    from asyncrl.rollout.metrics import RolloutMetrics
    from asyncrl.weights.publication import PublicationReport


_SERVING = frozenset({EngineState.SERVING, EngineState.UPDATING, EngineState.OFFLOADED})
"""States of an engine that does its work. An engine is STOPPED only where somebody asked for that."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One point of held-out accuracy."""

    step: int
    """Steps trained before it."""
    accuracy: float


class Recorder:
    """The account of one attempt of a run."""

    def __init__(self, *, display: Display, metrics: MetricsLog, events: EventLog) -> None:
        self._display = display
        self._metrics = metrics
        self._events = events
        self._timer = StepTimer(on_phase=display.phase)
        self._rewards: list[float] = []
        self._evaluations: list[Evaluation] = []
        self._export: Path | None = None
        self._steps = 0
        self._trained_tokens: float | None = None
        self._largest_logprob_diff: float | None = None
        self._lost = _Lost()
        self._engines: dict[str, str] = {}
        self._loop_began = False
        events.listen(self._watch_engines)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Counts the time of the body as phase `name`; `StepTimer` names those in use."""
        return self._timer.phase(name)

    def start(self, total_steps: int | None, first_step: int = 0) -> None:
        """Begins the steps `first_step` to `total_steps`; the time before this call was start-up."""
        self._steps = first_step
        self._display.start(total_steps)
        time = self._timer.finish_step()
        self._events.emit(LoopStarted(seconds=time.seconds, phases=dict(time.phases)))
        self._loop_began = True
        interpreter.settle()

    def note(self, text: str) -> None:
        """Shows one line that stays on the screen."""
        self._display.note(text)

    def evaluated(self, step: int, accuracy: float | None, metrics: Mapping[str, float], skipped: str | None) -> None:
        """Adds a point of held-out accuracy after `step` steps; None where it was skipped, for reason `skipped`."""
        if accuracy is None:
            self._display.note(f"evaluation after step {step} skipped: {skipped}")
            return
        self._metrics.write(step, metrics)
        self._evaluations.append(Evaluation(step, accuracy))
        self._display.note(f"held-out accuracy after step {step}: {accuracy:.3f}")

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
        metrics = {**rollout.as_dict(), **training, **({} if publication is None else publication.metrics())}
        self._steps = step
        self._rewards.append(rollout.reward_mean)
        if (tokens := training.get("train/trained_tokens")) is not None:
            self._trained_tokens = (self._trained_tokens or 0.0) + tokens
        if (difference := training.get("train/logprob_diff_max")) is not None:
            self._largest_logprob_diff = max(self._largest_logprob_diff or 0.0, difference)
        silent = training.get("train/groups_without_signal")
        self._lost.add(rollout, None if silent is None else int(silent))
        self._metrics.write(step, {**metrics, **time.metrics()})
        self._events.emit(
            StepFinished(step=step, seconds=time.seconds, version=None if publication is None else publication.version)
        )
        self._display.step(
            StepReport(
                step=step,
                reward_mean=rollout.reward_mean,
                response_length=rollout.response_tokens_mean,
                tokens_per_s=rollout.tokens_per_s,
                loss=training.get("train/loss", math.nan),
                seconds=time.seconds,
                time_split=time.phases,
                accuracy=next((e.accuracy for e in self._evaluations if e.step == step - 1), None),
                groups=rollout.groups,
                groups_without_signal=None if silent is None else int(silent),
                samples=rollout.samples + rollout.failed_samples,
                failed_samples=rollout.failed_samples,
                dropped_groups=rollout.dropped_groups,
                failure=rollout.failure,
            )
        )
        if self._lost.silent_steps == 1 and silent == rollout.groups:
            self._display.note(
                f"step {step} learned nothing: within each of its {rollout.groups} groups all rewards are equal. Where "
                "that goes on, the task is too easy or too hard, or the reward does not tell samples apart"
            )

    def summary(self, outcome: str, model: Path) -> RunSummary:
        """The run up to now; `outcome` says how it ended."""
        totals = self._timer.totals()
        first, last = (self._evaluations[0], self._evaluations[-1]) if self._evaluations else (None, None)
        return RunSummary(
            accuracy_before=first.accuracy if first else None,
            accuracy_after=last.accuracy if last and last is not first else None,
            seconds=totals.seconds,
            steps=self._steps,
            time_split=totals.phases,
            export=None if self._export is None else str(self._export),
            rewards=tuple(self._rewards),
            accuracies=tuple((e.step, e.accuracy) for e in self._evaluations),
            outcome=outcome,
            facts={"model": os.path.abspath(model)} | self._facts(),
        )

    def _facts(self) -> dict[str, str | int | float | None]:
        """What was measured, and what went wrong. What did not happen has no line."""
        facts: dict[str, str | int | float | None] = {}
        if self._trained_tokens is not None:
            facts["tokens trained"] = int(self._trained_tokens)
        if self._largest_logprob_diff is not None:
            facts["largest log-prob difference"] = self._largest_logprob_diff
        return facts | self._lost.facts()

    def _watch_engines(self, event: Mapping[str, Any]) -> None:
        """Tells the display how many engines serve, from the first step on."""
        if event["kind"] != "engine_state" or event.get("model", ACTOR) != ACTOR:
            return
        self._engines[event["engine"]] = event["state"]
        if self._loop_began:
            states = [state for state in self._engines.values() if state != EngineState.STOPPED]
            self._display.engines(sum(state in _SERVING for state in states), len(states))


class _Lost:
    """Counts the samples and groups of a run from which nothing was learned."""

    def __init__(self) -> None:
        self.silent_steps = 0
        """Steps in which no group had a signal."""
        self._samples = self._failed = self._groups = self._silent = self._dropped = 0
        self._failures: Counter[str] = Counter()
        """Failed samples by the most common failure of their step."""

    def add(self, rollout: RolloutMetrics, silent: int | None) -> None:
        """Counts a step; `silent` of its groups have no signal. None where the loss needs none."""
        self._samples += rollout.samples + rollout.failed_samples
        self._failed += rollout.failed_samples
        self._dropped += rollout.dropped_groups
        if rollout.failure:
            self._failures[rollout.failure] += max(1, rollout.failed_samples)
        if silent is not None:
            self._groups += rollout.groups
            self._silent += silent
            self.silent_steps += silent == rollout.groups

    def facts(self) -> dict[str, str | int | float | None]:
        """Lines of the summary."""
        facts: dict[str, str | int | float | None] = {}
        reason = f", most often: {self._failures.most_common(1)[0][0]}" if self._failures else ""
        if self._failed:
            facts["failed samples"] = f"{self._failed} of {self._samples}{reason}"
        if self._dropped:
            facts["groups replaced"] = f"{self._dropped}" + ("" if self._failed else reason)
        if self._silent:
            facts["groups without signal"] = f"{self._silent} of {self._groups}, their rewards being all equal"
        return facts


def conclude(recorder: Recorder, outcome: str, *, run_dir: Path, model: Path) -> None:
    """Writes and prints the summary, then draws the reward curve. Call it after the event loop: it takes a second.

    The summary comes first, so that a process which is ended meanwhile has said how the run went.
    """
    summary = recorder.summary(outcome, model)
    print_summary(summary, sys.stdout, (write_summary(summary, run_dir),))
    curve = write_curve(summary, run_dir)
    if curve is not None:
        print(f"\nreward curve  {curve}", flush=True)
