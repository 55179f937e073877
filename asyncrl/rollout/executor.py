"""RolloutExecutor: draws prompts, has them answered and scored, and hands the trainer one RolloutBatch after another.

    prompts ──► Production ◄──── groups ────► Connection ────► router ────► engines
                (scheduling/)                 (generation/, requests/)
                     │                             └── samples ──► Scorer (rewards/)
                     └──► Handover ──► get, commit

It knows the address of the router and nothing else of the engines; it never sees the trainer.

Invariants
- Every admitted group ends exactly once: trained, filtered or dropped with a reason (`ledger.py`), also when a `get`
  fails. A `get` that is cancelled leaves its groups to the next.
- A failed sample costs neither its group nor the run; what fails too often ends the run with one error that counts it
  (`collection.py`).
- No token in a batch is staler than rollout.max_staleness (`admission.py`). Within that, groups come earliest deadline
  first, then in the order in which their prompts were drawn.
- Several trainers (an actor and its critic) get the same batches, each at its own pace.
- Only after `generate_ahead` is anything generated while no `get` waits.
- A new process that `restore`s what `save` returned goes on as if nothing had ended: no prompt is skipped or repeated.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import structlog
from anyio.abc import TaskGroup

from asyncrl.algorithms.chosen import make_algorithm
from asyncrl.config import Config
from asyncrl.config.sections.data import DataConfig
from asyncrl.data.batch import RolloutBatch
from asyncrl.data.datasets import PromptSet, load_prompts
from asyncrl.data.fleet import DistrustEngine, EvalFleetInfo, PinEvalFleet
from asyncrl.data.prompt_stream import PromptStream
from asyncrl.data.sample import Sample, SampleGroup
from asyncrl.data.sources import Progress
from asyncrl.data.staleness import Bound, step_of
from asyncrl.data.tokenizer import PolicyTokenizer
from asyncrl.errors import ConfigError, RolloutError
from asyncrl.observability.events import EventLog
from asyncrl.observability.samples.log import SampleLog
from asyncrl.rollout.connection import Connection, Connections
from asyncrl.rollout.evaluation import EvalReport
from asyncrl.rollout.evaluator import Beside, Evaluator, HeldOut
from asyncrl.rollout.external_evaluation import ExternalEvaluation
from asyncrl.rollout.group_events import RewardFailed
from asyncrl.rollout.handover import Handover, in_thread
from asyncrl.rollout.metrics import RolloutMetrics
from asyncrl.rollout.reading import read_in_thread
from asyncrl.rollout.requests.generate_client import ClientStatistics
from asyncrl.rollout.requests.wire import SamplingParams
from asyncrl.rollout.rewards.pool import ProcessHost
from asyncrl.rollout.rewards.registry import resolve_reward
from asyncrl.rollout.rewards.result import is_fault
from asyncrl.rollout.rewards.scorer import Scorer
from asyncrl.rollout.sampling import eval_sampling, longest_prompt, training_sampling
from asyncrl.rollout.saved_rollout import SavedRollout, decode_rollout, encode_rollout, made_with
from asyncrl.rollout.scheduling.admission import Limits
from asyncrl.rollout.scheduling.collection import FirstBatchCheck
from asyncrl.rollout.scheduling.deliveries import TRAINER
from asyncrl.rollout.scheduling.filters import Filters
from asyncrl.rollout.scheduling.group import GroupState, Issue
from asyncrl.rollout.scheduling.ledger import Ledger, Reached
from asyncrl.rollout.scheduling.production import Production

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ExecutorStatistics:
    """A snapshot of what an executor has done."""

    groups: Mapping[GroupState, int]
    """Groups by state, over the whole attempt."""
    drop_reasons: Mapping[str, int]
    client: ClientStatistics
    aborted_requests: int
    """Requests that were ended in their engines because no sample needed them any more."""
    concurrency: int
    """Most requests in flight, as of now."""
    engines_paused_s: float
    """Seconds in which the deadlines of requests stood still."""
    reward_failures: Mapping[str, int]
    dropped_overlong: int
    """Prompts left out of the data because they leave no room for a response."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """What `start` builds."""

    scorer: Scorer
    engines: Connection
    stream: PromptStream
    production: Production
    handover: Handover
    evaluator: Evaluator
    dropped_overlong: int


@dataclass(frozen=True, slots=True)
class _Watch:
    """Follows one group of `_generate`."""

    started: Callable[[], None]
    scored: Callable[[Sample], None]


class RolloutExecutor:
    """Construct, `start`, then `get`/`commit` per step; `dispose` at the end."""

    def __init__(
        self,
        config: Config,
        *,
        router_url: str,
        host: ProcessHost | None,
        events: EventLog,
        tokenizer: PolicyTokenizer,
        log_dir: Path,
        trainers: Sequence[str] = (TRAINER,),
        name: str = "",
    ) -> None:
        """`host` runs the reward workers (None where there are none); their logs go to `log_dir`. All of `trainers`
        train on every batch. `name` tells several executors of one job apart: their ids, processes and files.

        Raises ConfigError for sampling that cannot work with this model, and for a name that is no word.
        """
        if name and not _NAME.fullmatch(name):
            raise ConfigError(
                f"the name of a rollout executor is a letter, then letters, digits and underscores, and not {name!r}"
            )
        self._config = config
        self._router_url = router_url
        self._host = host
        self._events = events
        self._tokenizer = tokenizer
        self._log_dir = log_dir
        self.name = name
        """Empty for the only executor of a job. Ids of groups and samples begin with it."""
        self._sampling = training_sampling(config, tokenizer)
        self._eval_sampling = eval_sampling(config, self._sampling)
        self._ledger = Ledger(events.emit)
        self._trainers = trainers
        self._parts: _Parts | None = None
        self._to_close = AsyncExitStack()

    async def start(
        self,
        task_group: TaskGroup,
        *,
        pin_eval_fleet: PinEvalFleet | None = None,
        distrust: DistrustEngine | None = None,
    ) -> None:
        """Loads the data, imports the reward and starts its workers, which live in `task_group` until `dispose`.

        `pin_eval_fleet` brings the engines that only evaluate to a checkpoint; `distrust` is told of an engine whose
        answers cannot be believed. Needs no engine yet. Raises DataError, RewardError, ConfigError.
        """
        config, rollout, held_out = self._config, self._config.rollout, self._config.eval.data
        wanted = config.reward
        reward = await in_thread(lambda: resolve_reward(wanted.function, wanted.args, wanted.scope))
        filters = await in_thread(lambda: Filters(rollout.filters))
        algorithm = await in_thread(lambda: make_algorithm(config))
        scorer = Scorer(reward, wanted, host=self._host, log_dir=self._log_dir, name=self.name)
        self._to_close.push_async_callback(scorer.aclose)
        await scorer.start(task_group)
        trains = config.data.source or config.train.num_steps != 0
        prompts = await self._load(config.data, self._sampling, "data") if trains else PromptSet((), 0, 0)
        eval_prompts: PromptSet | None = None
        if held_out is not None:
            eval_prompts = await self._load(held_out, self._eval_sampling, "eval.data")
        external = None
        if config.eval.function is not None:
            external = await in_thread(
                lambda: ExternalEvaluation(
                    config.eval, config.model.path, host=self._host, log_dir=self._log_dir, name=self.name
                )
            )
        connections = Connections(
            config, scorer, task_group, tokenizer=self._tokenizer, events=self._events, distrust=distrust
        )
        self._to_close.push_async_callback(connections.aclose)
        engines = connections.open(self._router_url)
        stream = await in_thread(lambda: PromptStream.of(prompts, config.data, self.name))
        production = Production(
            Limits(rollout.prompts_per_step, Bound.of(config).batches, rollout.oversample, rollout.straggler),
            stream=stream,
            generate=self._generate,
            filters=filters,
            min_usable=algorithm.needs.group_samples,
            first_batch=FirstBatchCheck(
                wanted.function, rollout.prompts_per_step * rollout.samples_per_prompt, wanted.max_failure_fraction
            ),
            ledger=self._ledger,
            waiting=max(2, engines.slots.limit // rollout.samples_per_prompt),
        )
        await task_group.start(production.serve, name="groups")
        self._to_close.push_async_callback(production.aclose)
        samples = SampleLog(config.run.dir, config.samples, self._events.attempt, self._tokenizer.decode)
        evaluator = Evaluator(
            config.eval,
            HeldOut(None if eval_prompts is None else eval_prompts.prompts, self._eval_sampling),
            connections=connections,
            shared=engines,
            events=self._events,
            samples=samples,
            beside=None if pin_eval_fleet is None else Beside(pin_eval_fleet, external),
            executor=self.name,
        )
        handover = Handover(config, production, self._ledger, engines, self._trainers, samples, self.name)
        self._parts = _Parts(scorer, engines, stream, production, handover, evaluator, prompts.dropped_overlong)

    async def get(self, rollout_id: int, trainer: str = TRAINER) -> RolloutBatch:
        """The batch of step `rollout_id`: `prompts_per_step` groups, each with enough usable samples.

        Steps follow one another; the first may be any. Raises RolloutError when too many groups fail or are filtered,
        when the id is not the next one, or when the published weights are too old for it; RewardError when the reward
        fails on too much of the first batch.
        """
        return await self._started.handover.get(rollout_id, trainer)

    def generate_ahead(self, first: int, num_rollouts: int) -> None:
        """From now on the groups of the rollouts [first, num_rollouts) are generated also while no `get` waits.

        As far ahead of the trainer as rollout.max_staleness allows; `get` and `set_weight_version` stay as they are.
        """
        self._started.handover.generates_ahead()
        self._started.production.run_ahead(first, num_rollouts)

    @property
    def last_rollout(self) -> RolloutMetrics:
        """Figures of the batch that `get` returned last. RolloutError before the first."""
        return self._started.handover.last

    async def commit(self, rollout_id: int, trainer: str = TRAINER) -> None:
        """`trainer` has trained the batch. RolloutError when it never got it, or committed it before."""
        self._started.handover.commit(rollout_id, trainer)

    def settle(self, step: int, trainer: str = TRAINER) -> None:
        """The job ends, and `trainer` has trained the steps before `step`: a later batch is taken back.

        `save` returns the groups of that batch, to be generated again; the batch trained last is committed.
        """
        self._started.handover.settle(step, trainer)

    async def save(self) -> dict[str, bytes]:
        """Files for a checkpoint of the trainer as it is between a `commit` and the next `get`.

        Raises RolloutError while a batch is with a trainer, and the error that made generation fail.
        """
        self._started.handover.check_all_committed()
        finished, again = self._started.production.save()
        prompts, ended = self._started.stream.state(), self._ledger.ended
        reasons, settings = dict(self._ledger.drop_reasons), made_with(self._config)
        saved = SavedRollout(prompts, again, finished, ended, reasons, settings)
        return await in_thread(lambda: encode_rollout(saved))

    async def restore(
        self, files: Mapping[str, bytes], step: int, on_reached: Callable[[Reached], Awaitable[object]] | None = None
    ) -> Reached:
        """Goes on from what `save` returned when `step` batches were trained; before the first `get`.

        Returns how far that was; `on_reached` hears it before any group comes back. Groups that were finished under
        other settings of sampling or reward are generated again. Raises CheckpointError for files that cannot be read,
        DataError for other data.
        """
        saved = await in_thread(lambda: decode_rollout(files, self._started.stream))
        reached = saved.reached
        if on_reached is not None:
            await on_reached(reached)
        saved, changed = saved.under(made_with(self._config))
        if changed:
            _log.warning(
                "finished groups of the checkpoint are generated again: settings were changed", changed=changed
            )
        self._started.production.restore(step, saved.finished, saved.again)
        self._ledger.continue_counts(saved.ended, saved.drop_reasons)
        return reached

    async def eval(self, rollout_id: int, hf_dir: Path | None = None) -> EvalReport:
        """Samples every held-out prompt; an evaluation that fails is a skipped point with a reason.

        On engines of `eval.fleet`, which load the published weights first; or the model in `hf_dir`, a Hugging Face
        directory, which nothing else can evaluate. `eval.function` gets the directory instead.
        """
        return await self._started.evaluator.run(rollout_id, hf_dir)

    def set_eval_fleet(self, info: EvalFleetInfo | None) -> None:
        """Evaluations go through the router of `info` from now on; None: through the training engines' router."""
        self._started.evaluator.set_fleet(info)

    def report_eval_skip(self, rollout_id: int, reason: str) -> EvalReport:
        """The skipped point of an evaluation that could not begin."""
        return self._started.evaluator.report_skip(rollout_id, reason)

    def set_weight_version(self, version: str) -> None:
        """The engines hold `version` (`attempt.step`) now; its step bounds what may be generated and trained.

        Before the first call the weights count as ones that never change, so that nothing is ever stale.
        """
        self._started.handover.published_version = version
        self._started.engines.client.published(version)
        self._started.production.publish(step_of(version))

    def updating(self) -> AbstractAsyncContextManager[None]:
        """Enter it around an update of the weights: requests in flight do what weights.on_update says."""
        return self._started.engines.updating()

    def engines_paused(self) -> None:
        """Engines generate nothing from now on: the clock of all deadlines of requests stands still."""
        self._started.engines.clock.pause()

    def engines_resumed(self) -> None:
        """The end of the pause; harmless without one."""
        self._started.engines.clock.resume()

    def get_num_rollout_per_epoch(self) -> int:
        """Whole batches in one pass over the data; DataError when the data does not fill one."""
        return self._started.stream.num_rollouts_per_epoch(self._config.rollout.prompts_per_step)

    def statistics(self) -> ExecutorStatistics:
        """Counts since the start of this attempt; of groups, also what was restored."""
        parts = self._started
        return ExecutorStatistics(
            groups=self._ledger.counts(),
            drop_reasons=dict(self._ledger.drop_reasons),
            client=parts.engines.client.statistics(),
            aborted_requests=parts.engines.aborts.requests,
            concurrency=parts.engines.slots.limit,
            engines_paused_s=parts.engines.clock.stood_still_s,
            reward_failures=dict(parts.scorer.failures),
            dropped_overlong=parts.dropped_overlong,
        )

    async def dispose(self) -> None:
        """Ends generation, the reward workers and the connections; batches that are not committed are dropped.

        Idempotent.
        """
        self._ledger.drop_delivered("the job ended before they were trained")
        if self._parts is not None:
            self._parts.handover.end()
        await self._to_close.aclose()

    @property
    def _started(self) -> _Parts:
        if self._parts is None:
            raise RolloutError("the rollout executor was not started; await start(task_group) first")
        return self._parts

    async def _load(self, data: DataConfig, sampling: SamplingParams, where: str) -> PromptSet:
        longest = longest_prompt(self._config, self._tokenizer, sampling)

        def load(progress: Progress) -> PromptSet:
            return load_prompts(data, self._tokenizer, max_prompt_tokens=longest, where=where, progress=progress)

        return await read_in_thread(load, where, data.source)

    async def _generate(self, issue: Issue, on_started: Callable[[], None]) -> SampleGroup:
        """Has one group generated and scored by the training engines."""
        return await self._started.engines.generator.run(
            issue.group_id,
            issue.prompt,
            self._sampling,
            self._config.rollout.samples_per_prompt,
            _Watch(on_started, self._scored),
        )

    def _scored(self, sample: Sample) -> None:
        if sample.failure is not None and is_fault(sample.failure):
            self._events.emit(RewardFailed(sample_id=sample.sample_id, reason=sample.failure))
        self._started.production.scored(sample)
