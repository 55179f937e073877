"""What a loop tells about itself: phases, steps, evaluations, and the summary at the end.

One place feeds all who listen: the live display, metrics.jsonl, events.jsonl and summary.json. A loop calls
`phase`, `step` and `evaluated`, and never formats a number.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.observability.display import Display, StepReport
from asyncrl.observability.events import EventLog, StepFinished
from asyncrl.observability.metrics import MetricsLog, StepTimer
from asyncrl.observability.summary import RunSummary, print_summary, write_curve, write_summary

if TYPE_CHECKING:  # torch stays out of the driver until the engines are on their way
    from asyncrl.rollout.metrics import RolloutMetrics
    from asyncrl.weights.publication import PublicationReport


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
        self._tokens = 0
        self._largest_logprob_diff = 0.0

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Counts the time of the body as `name` (startup, generate, train, publish, eval)."""
        return self._timer.phase(name)

    def start(self, total_steps: int | None, first_step: int = 0) -> None:
        """The steps begin; all time so far was start-up."""
        self._steps = first_step
        self._display.start(total_steps)
        self._timer.finish_step()

    def note(self, text: str) -> None:
        """One line worth keeping on the screen."""
        self._display.note(text)

    def evaluated(self, step: int, accuracy: float | None, metrics: Mapping[str, float], skipped: str | None) -> None:
        """An evaluation ended; `accuracy` is None where it was skipped, with the reason."""
        if accuracy is None:
            self._display.note(f"evaluation after step {step} skipped: {skipped}")
            return
        self._metrics.write(step, metrics)
        self._evaluations.append(Evaluation(step, accuracy))
        self._display.note(f"held-out accuracy after step {step}: {accuracy:.3f}")

    def exported(self, directory: Path) -> None:
        """The final policy is on disk."""
        self._export = directory
        self._display.note(f"exported the policy to {directory}")

    @property
    def steps(self) -> int:
        """Steps trained so far."""
        return self._steps

    def step(
        self, step: int, rollout: RolloutMetrics, training: Mapping[str, float], publication: PublicationReport
    ) -> None:
        """Step number `step` (from 1) is generated, trained and published."""
        time = self._timer.finish_step()
        metrics = {**rollout.as_dict(), **training, **publication.metrics()}
        self._steps = step
        self._tokens += rollout.response_tokens
        self._rewards.append(rollout.reward_mean)
        self._largest_logprob_diff = max(self._largest_logprob_diff, training.get("train/logprob_diff_max", 0.0))
        self._metrics.write(step, {**metrics, **time.metrics()})
        self._events.emit(StepFinished(step=step, seconds=time.seconds, version=publication.version))
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
            )
        )

    def summary(self, outcome: str, model: Path) -> RunSummary:
        """The run as it stands."""
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
            facts={
                "model": str(model),
                "tokens trained": self._tokens,
                "largest log-prob difference": self._largest_logprob_diff,
            },
        )


def conclude(recorder: Recorder, outcome: str, *, run_dir: Path, model: Path) -> None:
    """Writes and prints the summary, then draws the reward curve; after the event loop, since that takes a second.

    In this order, so that an end that is cut short has said how the run went.
    """
    summary = recorder.summary(outcome, model)
    print_summary(summary, sys.stdout, (write_summary(summary, run_dir),))
    curve = write_curve(summary, run_dir)
    if curve is not None:
        print(f"\nreward curve  {curve}", flush=True)
