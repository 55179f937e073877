"""Evaluator: samples the held-out prompts and reports one point of the curve.

Invariant: whatever goes wrong is a skipped point with a reason, never the end of the run; and each point is told to the
event log.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import anyio

from asyncrl.config.run import EvalConfig
from asyncrl.data.fleet import EvalFleetInfo
from asyncrl.data.sample import Prompt, SampleGroup
from asyncrl.errors import AsyncRLError, RolloutError
from asyncrl.observability.events import EventLog
from asyncrl.observability.waits import waiting
from asyncrl.rollout.evaluation import EvalReport, report_samples, skipped_report
from asyncrl.rollout.events import Evaluated
from asyncrl.rollout.generation import GroupGenerator
from asyncrl.rollout.wire import SamplingParams


class Evaluator:
    """Asks the training engines, or those of the evaluation fleet once there is one."""

    def __init__(
        self,
        config: EvalConfig,
        prompts: tuple[Prompt, ...] | None,
        sampling: SamplingParams,
        *,
        shared: GroupGenerator,
        generator_for: Callable[[str], GroupGenerator],
        events: EventLog,
    ) -> None:
        """`shared` asks the training engines; `generator_for` makes one that asks the router of a url."""
        self._config = config
        self._prompts = prompts
        self._sampling = sampling
        self._shared = shared
        self._generator_for = generator_for
        self._events = events
        self._fleet: tuple[EvalFleetInfo, GroupGenerator] | None = None
        self._runs: Counter[int] = Counter()
        """Evaluations by rollout id: no id of a request is used twice."""

    def set_fleet(self, info: EvalFleetInfo | None) -> None:
        """Evaluations go through the router of `info` from now on; None: through that of the training engines."""
        if info is None:
            self._fleet = None
        elif self._fleet is not None and self._fleet[0].router_url == info.router_url:
            self._fleet = info, self._fleet[1]
        else:
            self._fleet = info, self._generator_for(info.router_url)

    def report_skip(self, rollout_id: int, reason: str) -> EvalReport:
        """The point that an evaluation leaves which could not begin."""
        return self._told(skipped_report(rollout_id, reason))

    async def run(self, rollout_id: int) -> EvalReport:
        """Samples every held-out prompt."""
        config, prompts = self._config, self._prompts
        pinned, generator = (None, self._shared) if self._fleet is None else (self._fleet[0].version, self._fleet[1])
        if prompts is None:
            return self.report_skip(rollout_id, "there are no held-out prompts (eval.data)")
        name = f"e{rollout_id:07d}" + (f"r{self._runs[rollout_id]}" if rollout_id in self._runs else "")
        self._runs[rollout_id] += 1
        began = time.monotonic()
        groups: list[SampleGroup] = []
        errors: list[AsyncRLError] = []

        async def one(index: int) -> None:
            group_id = f"{name}.{index:07d}"
            try:
                group = await generator.run(group_id, prompts[index], self._sampling, config.samples_per_prompt)
            except AsyncRLError as error:
                errors.append(error)
                evaluation.cancel_scope.cancel()
            else:
                groups.append(group)

        try:
            with waiting("evaluation", f"{len(prompts)} prompts at rollout {rollout_id}", config.timeout_s):
                async with anyio.create_task_group() as evaluation:
                    for index in range(len(prompts)):
                        evaluation.start_soon(one, index)
        except TimeoutError as error:
            errors.append(RolloutError(str(error)))
        if errors:
            reason = f"{errors[0]}; {len(groups)} prompts were done"
            report = skipped_report(rollout_id, reason, num_prompts=len(prompts), seconds=time.monotonic() - began)
        else:
            samples = [sample for group in groups for sample in group.samples]
            report = report_samples(
                rollout_id,
                samples,
                num_prompts=len(prompts),
                threshold=config.threshold,
                seconds=time.monotonic() - began,
                pinned=pinned,
            )
        return self._told(report)

    def _told(self, report: EvalReport) -> EvalReport:
        self._events.emit(
            Evaluated(
                rollout_id=report.rollout_id,
                accuracy=report.accuracy,
                num_samples=report.num_samples,
                seconds=report.seconds,
                skipped=report.skipped,
            )
        )
        return report
