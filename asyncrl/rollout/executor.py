"""RolloutExecutor: draws prompts, has them answered and scored, and hands the trainer one RolloutBatch after the other.

It knows the router's address and nothing else of the engines; it never sees the trainer.

Invariants
- Every admitted group ends exactly once: trained, filtered or dropped with a reason (`ledger.py`), also when a `get`
  fails. A `get` that is cancelled leaves its groups to the next.
- A failed sample costs neither its group nor the run; what fails too often ends the run with one error that counts it
  (`collection.py`).
- No token in a batch is staler than rollout.max_staleness (`admission.py`). Within that, groups come earliest deadline
  first, then in the order in which their prompts were drawn.
- Several trainers (an actor and its critic) get the same batches, each at its own pace.
- Only after `generate_ahead` is anything generated while no `get` waits.
- What `save` returned, `restore`d in a new process, goes on as if nothing had ended: no prompt is skipped or repeated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.lowlevel
import structlog
from anyio.abc import TaskGroup

from asyncrl.config import Config
from asyncrl.config.sections.data import DataConfig
from asyncrl.data.batch import RolloutBatch
from asyncrl.data.datasets import PromptSet, load_prompts
from asyncrl.data.fleet import EvalFleetInfo
from asyncrl.data.prompt_stream import PromptStream
from asyncrl.data.sample import Sample, SampleGroup
from asyncrl.data.saved_batch import ROLLOUTS, keep_batch
from asyncrl.data.staleness import Bound, step_of
from asyncrl.data.tokenizer import PolicyTokenizer
from asyncrl.errors import RolloutError
from asyncrl.observability.events import EventLog
from asyncrl.observability.waits import WAITS
from asyncrl.rollout.evaluation import EvalReport
from asyncrl.rollout.evaluator import Evaluator
from asyncrl.rollout.group_events import RewardFailed
from asyncrl.rollout.metrics import RolloutMetrics, measure_rollout
from asyncrl.rollout.requests.connection import Connection, Connections
from asyncrl.rollout.requests.wire import SamplingParams
from asyncrl.rollout.rewards.pool import ProcessHost
from asyncrl.rollout.rewards.registry import resolve_reward
from asyncrl.rollout.rewards.scorer import Scorer
from asyncrl.rollout.sampling import eval_sampling, longest_prompt, training_sampling
from asyncrl.rollout.saved_rollout import SavedRollout, decode_rollout, encode_rollout, made_with
from asyncrl.rollout.scheduling.admission import Limits
from asyncrl.rollout.scheduling.collection import FirstBatchCheck
from asyncrl.rollout.scheduling.deliveries import TRAINER, Deliveries
from asyncrl.rollout.scheduling.filters import Filters
from asyncrl.rollout.scheduling.group import Group, Issue
from asyncrl.rollout.scheduling.ledger import Ledger, Reached
from asyncrl.rollout.scheduling.production import Production
from asyncrl.rollout.statistics import ExecutorStatistics

T = TypeVar("T")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What `start` builds."""

    scorer: Scorer
    engines: Connection
    stream: PromptStream
    production: Production
    evaluator: Evaluator
    dropped_overlong: int


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
        train on every batch. `name` tells the processes of several executors of one job apart.

        Raises ConfigError for sampling that cannot work with this model.
        """
        self._config = config
        self._router_url = router_url
        self._host = host
        self._events = events
        self._tokenizer = tokenizer
        self._log_dir = log_dir
        self._name = name
        self._sampling = training_sampling(config, tokenizer)
        self._eval_sampling = eval_sampling(config, self._sampling)
        self._ledger = Ledger(events.emit)
        self._deliveries = Deliveries(trainers)
        self._several = len(trainers) > 1
        self._gathering = anyio.Lock()
        self._shared: dict[int, RolloutBatch] = {}
        """Batches that some trainer still has to get, by rollout id."""
        self._bound = Bound.of(config)
        self._generates_ahead = False
        self._delivered_at = 0.0
        """time.monotonic() of the last delivery."""
        self._published_version: str | None = None
        self._last_rollout: RolloutMetrics | None = None
        rollout = config.rollout
        self._min_usable = min(2, rollout.samples_per_prompt) if config.train.loss == "grpo" else 1
        self._first_batch = FirstBatchCheck(
            config.reward.function,
            rollout.prompts_per_step * rollout.samples_per_prompt,
            config.reward.max_failure_fraction,
        )
        self._parts: _Parts | None = None
        self._to_close = AsyncExitStack()
        self._failed_attempts = 0
        """Failed attempts up to the last delivery."""
        self._aborted_requests = 0
        """Likewise of requests that engines were told to end."""

    async def start(self, task_group: TaskGroup) -> None:
        """Loads the data, imports the reward and starts its workers, which live in `task_group` until `dispose`.

        Needs no engine yet. Raises DataError, RewardError, ConfigError.
        """
        config, rollout = self._config, self._config.rollout
        reward = await _in_thread(lambda: resolve_reward(config.reward.function, config.reward.args))
        filters = await _in_thread(lambda: Filters(rollout.filters))
        scorer = Scorer(reward, config.reward, host=self._host, log_dir=self._log_dir, name=self._name)
        self._to_close.push_async_callback(scorer.aclose)
        await scorer.start(task_group)
        prompts = await _in_thread(lambda: self._load(config.data, self._sampling, "data"))
        held_out = config.eval.data
        eval_prompts = (
            None
            if held_out is None
            else await _in_thread(lambda: self._load(held_out, self._eval_sampling, "eval.data"))
        )
        connections = Connections(config, scorer, task_group, tokenizer=self._tokenizer, events=self._events)
        self._to_close.push_async_callback(connections.aclose)
        engines = connections.open(self._router_url)
        stream = await _in_thread(lambda: PromptStream.of(prompts, config.data))
        production = Production(
            Limits(rollout.prompts_per_step, self._bound.batches, rollout.oversample, rollout.straggler),
            stream=stream,
            generate=self._generate,
            filters=filters,
            min_usable=self._min_usable,
            ledger=self._ledger,
            waiting=max(2, rollout.concurrency // rollout.samples_per_prompt),
        )
        await task_group.start(production.serve, name="groups")
        self._to_close.push_async_callback(production.aclose)
        self._parts = _Parts(
            scorer=scorer,
            engines=engines,
            stream=stream,
            production=production,
            evaluator=Evaluator(
                config.eval,
                None if eval_prompts is None else eval_prompts.prompts,
                self._eval_sampling,
                shared=engines,
                connect=connections.open,
                retire=connections.retire,
                events=self._events,
            ),
            dropped_overlong=prompts.dropped_overlong,
        )

    async def get(self, rollout_id: int, trainer: str = TRAINER) -> RolloutBatch:
        """The batch of step `rollout_id`: `prompts_per_step` groups, each with enough usable samples.

        Steps follow one another; the first may be any. Raises RolloutError when too many groups fail or are filtered,
        when the id is not the next one, or when the published weights are too old for it; RewardError when the reward
        fails on too much of the first batch.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()  # the only chance where the batch is there
        self._deliveries.check_deliverable(rollout_id, trainer)
        if not self._several:
            return await self._gather(rollout_id, trainer)
        if rollout_id not in self._shared:
            with WAITS.register("shared batch", f"rollout {rollout_id}, for {trainer}", math.inf):
                async with self._gathering:  # whoever comes second waits for the batch of the first
                    if rollout_id not in self._shared:
                        self._shared[rollout_id] = await self._gather(rollout_id, trainer)
                        return self._shared[rollout_id]
        batch = self._shared[rollout_id]
        if not self._deliveries.share(rollout_id, trainer):
            del self._shared[rollout_id]
        return batch

    async def _gather(self, rollout_id: int, trainer: str) -> RolloutBatch:
        began = time.monotonic()
        taken = await self._started.production.take(rollout_id)
        self._deliveries.deliver(rollout_id, taken.groups, trainer)
        self._first_batch.closed = True
        now, engines = time.monotonic(), self._started.engines
        failed, aborted = sum(engines.client.statistics().failed_attempts.values()), engines.aborts.requests
        measure = partial(
            measure_rollout,
            rollout_id,
            taken.samples,
            epoch=taken.groups[0].issue.epoch,
            collection=taken.collection,
            ready_groups=taken.ready,
            failed_attempts=failed - self._failed_attempts,
            aborted_requests=aborted - self._aborted_requests,
            concurrency=engines.generator.concurrency,
            seconds=now - began,
            period_s=now - (self._delivered_at if self._generates_ahead else began),
            published_version=self._published_version,
            bound=self._bound,
        )
        self._delivered_at, self._failed_attempts, self._aborted_requests = now, failed, aborted
        with anyio.CancelScope(shield=True):  # it was taken: a caller that gives up would lose it
            self._last_rollout, batch = await _in_thread(lambda: self._deliver(measure, taken.samples))
        return batch

    def _deliver(
        self, measure: Callable[[], RolloutMetrics], groups: Sequence[SampleGroup]
    ) -> tuple[RolloutMetrics, RolloutBatch]:
        """In a thread: a batch may hold millions of tokens, and engines are answering meanwhile."""
        metrics = measure()
        batch = RolloutBatch.from_groups(metrics.rollout_id, groups, self._sampling.temperature)
        if self._config.debug.save_rollouts:
            keep_batch(batch, self._config.run.dir / ROLLOUTS, {"rollout": asdict(metrics)})
        return metrics, batch

    def generate_ahead(self, first: int, num_rollouts: int) -> None:
        """From now on the groups of the rollouts [first, num_rollouts) are generated without being asked for.

        As far ahead of the trainer as rollout.max_staleness allows; `get` and `set_weight_version` stay as they are.
        """
        self._generates_ahead, self._delivered_at = True, time.monotonic()
        self._started.production.run_ahead(first, num_rollouts)

    @property
    def last_rollout(self) -> RolloutMetrics:
        """Figures of the batch that `get` returned last. RolloutError before the first."""
        if self._last_rollout is None:
            raise RolloutError("no batch was delivered yet; await get() first")
        return self._last_rollout

    async def commit(self, rollout_id: int, trainer: str = TRAINER) -> None:
        """`trainer` has trained the batch. RolloutError when it never got it, or committed it before."""
        self._trained(rollout_id, self._deliveries.commit(rollout_id, trainer))

    def settle(self, step: int, trainer: str = TRAINER) -> None:
        """The job ends, and `trainer` has trained the batches before that of `step`: a later one is taken back.

        Its groups are in what `save` returns, to be generated again; what was trained last is committed.
        """
        self._trained(step - 1, self._deliveries.settle(step, trainer))

    async def save(self) -> dict[str, bytes]:
        """Files for a checkpoint of the trainer as it is between a `commit` and the next `get`.

        Raises RolloutError where a batch is with the trainer, and what made generation fail.
        """
        self._deliveries.check_all_committed()
        finished, again = self._started.production.save()
        prompts, ended = self._started.stream.state(), self._ledger.ended
        reasons, settings = dict(self._ledger.drop_reasons), made_with(self._config)
        saved = SavedRollout(prompts, again, finished, ended, reasons, settings)
        return await _in_thread(lambda: encode_rollout(saved))

    async def restore(self, files: Mapping[str, bytes], step: int) -> Reached:
        """Goes on from what `save` returned when `step` batches were trained; before the first `get`.

        Returns how far that was. Groups that were finished under other settings of sampling or reward are generated
        again. Raises CheckpointError for files that cannot be read, DataError for other data.
        """
        saved = await _in_thread(lambda: decode_rollout(files, self._started.stream))
        reached = saved.reached
        saved, changed = saved.under(made_with(self._config))
        if changed:
            _log.warning(
                "finished groups of the checkpoint are generated again: settings were changed", changed=changed
            )
        self._started.production.restore(step, saved.finished, saved.again)
        self._ledger.continue_counts(saved.ended, saved.drop_reasons)
        return reached

    async def eval(self, rollout_id: int) -> EvalReport:
        """Samples every held-out prompt; whatever goes wrong with that is a skipped point with a reason."""
        return await self._started.evaluator.run(rollout_id)

    def set_eval_fleet(self, info: EvalFleetInfo | None) -> None:
        """Evaluations go through the router of `info` from now on; None: through that of the training engines."""
        self._started.evaluator.set_fleet(info)

    def report_eval_skip(self, rollout_id: int, reason: str) -> EvalReport:
        """The point that an evaluation leaves which could not begin."""
        return self._started.evaluator.report_skip(rollout_id, reason)

    def set_weight_version(self, version: str) -> None:
        """The engines hold `version` (`attempt.step`) now; from its step follows what may be generated and trained.

        Without it the weights count as ones that never change, so that nothing is ever stale.
        """
        self._published_version = version
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
        return ExecutorStatistics(
            groups=self._ledger.counts(),
            drop_reasons=dict(self._ledger.drop_reasons),
            client=self._started.engines.client.statistics(),
            aborted_requests=self._started.engines.aborts.requests,
            concurrency=self._started.engines.generator.concurrency,
            engines_paused_s=self._started.engines.clock.stood_still_s,
            reward_failures=dict(self._started.scorer.failures),
            dropped_overlong=self._started.dropped_overlong,
        )

    async def dispose(self) -> None:
        """Ends what is being gathered or waits to be committed, the reward workers and the connections. Idempotent."""
        self._ledger.drop_delivered("the job ended before they were trained")
        self._deliveries.forget()
        await self._to_close.aclose()

    @property
    def _started(self) -> _Parts:
        if self._parts is None:
            raise RolloutError("the rollout executor was not started; await start(task_group) first")
        return self._parts

    def _load(self, data: DataConfig, sampling: SamplingParams, where: str) -> PromptSet:
        longest = longest_prompt(self._config, self._tokenizer, sampling)
        return load_prompts(data, self._tokenizer, max_prompt_tokens=longest, where=where)

    def _trained(self, rollout_id: int, groups: Sequence[Group] | None) -> None:
        """`groups` are those of a batch that its last trainer committed; None where others still train it."""
        if groups is not None:
            self._ledger.train(rollout_id, groups)

    async def _generate(self, issue: Issue, on_started: Callable[[], None]) -> SampleGroup:
        def on_scored(sample: Sample) -> None:
            if sample.failure is not None:
                self._events.emit(RewardFailed(sample_id=sample.sample_id, reason=sample.failure))
            if (error := self._first_batch.observe(sample)) is not None:
                parts.production.fail(error)

        parts = self._started
        return await parts.engines.generator.run(
            issue.group_id,
            issue.prompt,
            self._sampling,
            self._config.rollout.samples_per_prompt,
            on_started=on_started,
            on_scored=on_scored,
        )


async def _in_thread(function: Callable[[], T]) -> T:
    """Runs what would hold up the event loop; a cancelled job does not wait for it."""
    return await anyio.to_thread.run_sync(function, abandon_on_cancel=True)
