"""Evaluations of a run: in the loop where the training engines evaluate, beside it where others do.

Engines of `eval.fleet` and `eval.function` evaluate a copy of the published weights. A background task of the job waits
for them while the loop trains and publishes.

    evaluate 4      |- pin 0.4 -|------ samples ------| point of step 4, lag 3
    loop            | step 5 | step 6 | step 7 | step 8 ...

Invariants
- At most one evaluation is under way. `eval.if_busy` says what another one does meanwhile; that of the end waits.
- Each evaluation leaves one point, also one that fails or that the end of the job cuts short: a skipped point says why.
- A point says which weights were evaluated, and how far behind the training its result came. The evaluation of another
  model is an event and a note, and no point.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio.lowlevel

from asyncrl.data.staleness import step_of
from asyncrl.errors import AsyncRLError
from asyncrl.observability.waits import WAITS
from asyncrl.tasks import BackgroundTask

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from asyncrl.rollout.evaluation import EvalReport
    from asyncrl.run.job import Job
    from asyncrl.run.parts import InferencePart, RolloutPart
    from asyncrl.run.republication import Republication


METRICS: Mapping[str, str] = {
    "eval/lag_steps": "Steps that were trained since the evaluation was due: over 0 where it goes on beside the loop.",
    "eval/weights_step": "Step of the weights that were evaluated; absent where new ones came meanwhile.",
}
"""What the figures are that the loop adds to those of an `EvalReport`."""


class Evaluations:
    """See the module's docstring."""

    def __init__(
        self,
        job: Job,
        engines: InferencePart,
        executor: RolloutPart,
        republication: Republication,
        *,
        trained: Callable[[], int],
    ) -> None:
        """`trained` tells how many steps are trained now."""
        self._job = job
        self._engines = engines
        self._executor = executor
        self._republication = republication
        self._trained = trained
        self._under_way: tuple[int, BackgroundTask] | None = None
        """The step and the task of the evaluation beside the loop."""

    async def evaluate(self, step: int, hf_dir: Path | None, *, last: bool) -> EvalReport | None:
        """The point after `step` trained steps; None where its evaluation goes on beside the loop."""
        if not (self._job.config.eval.beside or hf_dir is not None):
            return await self._in_the_loop(step)
        if self._under_way is not None and self._job.config.eval.if_busy == "skip" and not last:
            busy = f"the evaluation after step {self._under_way[0]} is still under way (eval.if_busy)"
            return self._recorded(step, self._executor.report_eval_skip(step, busy))
        await self.finish()
        work = partial(self._beside, step, hf_dir)
        self._under_way = step, self._job.background.start(f"evaluation after step {step}", work)
        await anyio.lowlevel.checkpoint()  # the evaluation takes hold of the copy before newer weights are published
        return None

    async def finish(self) -> None:
        """Returns when no evaluation is under way."""
        if self._under_way is not None:
            step, task = self._under_way
            with WAITS.register("end of an evaluation", f"the evaluation after step {step}", self._patience_s):
                await task.wait()

    async def aclose(self) -> None:
        """Ends an evaluation that is under way; its point is skipped."""
        if self._under_way is not None:
            step, task = self._under_way
            await task.end()
            if self._under_way is not None:
                self._under_way = None
                self._recorded(step, self._executor.report_eval_skip(step, "the job ended before it did"))

    @property
    def _patience_s(self) -> float:
        """What bounds an evaluation: the start of its engines, and its own deadline."""
        return self._job.config.engine.start_timeout_s + self._job.config.eval.timeout_s

    async def _in_the_loop(self, step: int) -> EvalReport:
        async def measure() -> EvalReport:
            await self._engines.prepare_eval()
            return await self._executor.eval(step)

        try:
            report = await self._republication.during(measure)
        except AsyncRLError as error:  # it is a result: the job goes on
            report = self._executor.report_eval_skip(step, str(error))
        return self._recorded(step, report)

    async def _beside(self, step: int, hf_dir: Path | None) -> None:
        try:
            report = await self._executor.eval(step, hf_dir)
        except AsyncRLError as error:
            report = self._executor.report_eval_skip(step, str(error))
        self._under_way = None
        if hf_dir is None:
            self._recorded(step, report)
        else:  # another model is no point of this run's curve
            told = report.skipped or ", ".join(f"{name} {value:.4g}" for name, value in report.as_dict("").items())
            self._job.record.note(f"evaluation of {hf_dir}: {told}")

    def _recorded(self, step: int, report: EvalReport) -> EvalReport:
        metrics = report.as_dict()
        if metrics:
            metrics["eval/lag_steps"] = float(self._trained() - step)
            steps = [step_of(version) for version in report.versions]
            if len(steps) == 1 and steps[0] is not None:
                metrics["eval/weights_step"] = float(steps[0])
        self._job.record.evaluated(step, report.accuracy, metrics, report.skipped)
        if len(report.versions) > 1:
            self._job.record.note(
                f"the evaluation after step {step} mixes weights {', '.join(report.versions)}: new ones came while the "
                "training engines evaluated; add [eval.fleet], or evaluate while nothing is published"
            )
        return report
