"""Evaluator: samples the held-out prompts and reports one point of the curve; or has a function of the user's do so.

Invariants
- On engines that only evaluate, and by a function, one checkpoint is evaluated: it is pinned first. A point names the
  weights that made it.
- An evaluation that fails is a skipped point with a reason, never the end of the run. Each point is an event.
- The connection to an evaluation fleet is retired once that fleet was replaced and no evaluation uses it any more.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from asyncrl.config.sections.run import EvalConfig
from asyncrl.data.fleet import EvalFleetInfo, PinEvalFleet
from asyncrl.data.sample import Prompt, SampleGroup
from asyncrl.errors import AsyncRLError, EngineError, RolloutError, counted
from asyncrl.observability.events import EventLog
from asyncrl.observability.samples.log import SampleLog
from asyncrl.observability.waits import waiting
from asyncrl.rollout.connection import Connection, Connections
from asyncrl.rollout.evaluation import EvalReport, external_report, report_samples, skipped_report
from asyncrl.rollout.external_evaluation import ExternalEvaluation
from asyncrl.rollout.group_events import Evaluated
from asyncrl.rollout.handover import in_thread
from asyncrl.rollout.requests.wire import SamplingParams
from asyncrl.tasks import run_all


@dataclass(slots=True, eq=False)
class _Asked:
    """Engines that evaluate."""

    connection: Connection
    info: EvalFleetInfo | None = None
    """None for the training engines."""
    runs: int = 0
    """Evaluations in progress."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What is asked."""

    prompts: tuple[Prompt, ...] | None
    """None where nothing is held out."""
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Beside:
    """What evaluates beside the training engines."""

    pin: PinEvalFleet
    """Asked before each evaluation for the engines that only evaluate, or for the checkpoint of the function."""
    function: ExternalEvaluation | None = None
    """That of `eval.function`."""


class Evaluator:
    """Asks the training engines, or the engines of the evaluation fleet once there is one."""

    def __init__(
        self,
        config: EvalConfig,
        held_out: HeldOut,
        *,
        shared: Connection,
        connections: Connections,
        events: EventLog,
        samples: SampleLog,
        beside: Beside | None = None,
        executor: str = "",
    ) -> None:
        """`shared` asks the training engines; `connections` opens and retires connections to other routers.

        `samples` keeps what was answered. Without `beside` only `set_fleet` tells of engines that only evaluate. Ids
        begin with the name of the `executor`.
        """
        self._config = config
        self._prompts = held_out.prompts
        self._sampling = held_out.sampling
        self._shared = self._asked = _Asked(shared)
        self._connections = connections
        self._events = events
        self._samples = samples
        self._beside = beside
        self._executor = executor
        self._runs: Counter[int] = Counter()
        """Evaluations by rollout id: no id of a request is used twice."""

    def set_fleet(self, info: EvalFleetInfo | None) -> None:
        """Evaluations go through the router of `info` from now on; None: through the training engines' router."""
        before = self._asked
        if info is None:
            self._asked = self._shared
        elif before.info is not None and before.info.router_url == info.router_url:
            before.info = info
        else:
            self._asked = _Asked(self._connections.open(info.router_url), info)
        self._retire_unused(before)

    def _retire_unused(self, asked: _Asked) -> None:
        if asked is not self._asked and asked is not self._shared and not asked.runs:
            self._connections.retire(asked.connection)

    def report_skip(self, rollout_id: int, reason: str) -> EvalReport:
        """The skipped point of an evaluation that could not begin."""
        return self._reported(skipped_report(rollout_id, reason))

    async def run(self, rollout_id: int, hf_dir: Path | None = None) -> EvalReport:
        """Evaluates the policy, or on engines that only evaluate the model in `hf_dir`."""
        try:
            if self._beside is not None and (self._config.beside or hf_dir is not None):
                info = await self._beside.pin(hf_dir)
                if self._beside.function is not None:
                    return self._reported(await self._call(rollout_id, self._beside.function, info))
                self.set_fleet(info)
            elif hf_dir is not None:
                raise EngineError("no engines that only evaluate were given to this executor; see `start`")
        except AsyncRLError as error:
            return self.report_skip(rollout_id, str(error))
        if self._prompts is None:
            return self.report_skip(rollout_id, "there are no held-out prompts (eval.data)")
        asked = self._asked
        asked.runs += 1
        try:
            return self._reported(await self._sample(rollout_id, self._prompts, asked))
        finally:
            asked.runs -= 1
            self._retire_unused(asked)

    async def _call(self, rollout_id: int, function: ExternalEvaluation, info: EvalFleetInfo) -> EvalReport:
        assert info.directory is not None, "a pin without engines is one of a directory"
        began = time.monotonic()
        try:
            numbers = await function(info.directory)
        except (RolloutError, TimeoutError) as error:
            return skipped_report(rollout_id, str(error), seconds=time.monotonic() - began)
        return external_report(rollout_id, numbers, version=info.version, seconds=time.monotonic() - began)

    async def _sample(self, rollout_id: int, prompts: tuple[Prompt, ...], asked: _Asked) -> EvalReport:
        config, generator = self._config, asked.connection.generator
        pinned = None if asked.info is None else asked.info.version
        name = (
            (f"{self._executor}-" if self._executor else "")
            + f"e{rollout_id:07d}"
            + (f"r{self._runs[rollout_id]}" if rollout_id in self._runs else "")
        )
        self._runs[rollout_id] += 1
        began, done = time.monotonic(), 0

        async def sampled(index: int) -> SampleGroup:
            nonlocal done
            group_id = f"{name}.{index:07d}"
            group = await generator.run(group_id, prompts[index], self._sampling, config.samples_per_prompt)
            done += 1
            return group

        try:
            with waiting("evaluation", f"{len(prompts)} prompts at rollout {rollout_id}", config.timeout_s):
                groups = await run_all(*(partial(sampled, index) for index in range(len(prompts))))
        except (RolloutError, TimeoutError) as error:  # the connection was closed, or it took too long
            reason = f"{error}; {counted(done, 'prompt')} done"
            return skipped_report(rollout_id, reason, num_prompts=len(prompts), seconds=time.monotonic() - began)
        seconds = time.monotonic() - began
        await in_thread(lambda: self._samples.keep_evaluation(rollout_id, groups))
        return report_samples(
            rollout_id,
            [sample for group in groups for sample in group.samples],
            num_prompts=len(prompts),
            threshold=config.threshold,
            seconds=seconds,
            pinned=pinned,
        )

    def _reported(self, report: EvalReport) -> EvalReport:
        self._events.emit(
            Evaluated(
                executor=self._executor,
                rollout_id=report.rollout_id,
                accuracy=report.accuracy,
                mean_reward=report.mean_reward,
                num_samples=report.num_samples,
                seconds=report.seconds,
                skipped=report.skipped,
                versions=report.versions,
            )
        )
        return report
