"""RolloutExecutor: draws prompts, has them answered and scored, and hands the trainer one RolloutBatch after the other.

It knows the router's address and nothing else of the engines; it never sees the trainer.

Invariants
- Every admitted group ends exactly once: trained, filtered or dropped with a reason (`ledger.py`), also when a `get`
  fails or is cancelled.
- A failed sample costs neither its group nor the run; what fails too often ends the run with one error that counts it
  (`collection.py`).
- `get` returns groups in the order in which their prompts were drawn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import anyio
from anyio.abc import TaskGroup

from asyncrl.config import Config
from asyncrl.config.data import DataConfig
from asyncrl.data.batch import RolloutBatch
from asyncrl.data.datasets import PromptSet, load_prompts
from asyncrl.data.prompt_stream import PromptStream
from asyncrl.data.sample import Prompt, Sample, SampleGroup
from asyncrl.data.tokenizer import PolicyTokenizer
from asyncrl.errors import AsyncRLError, RolloutError
from asyncrl.observability.events import EventLog
from asyncrl.observability.waits import waiting
from asyncrl.rollout.collection import Collection, FirstBatchCheck, drop_reason, first_failure
from asyncrl.rollout.engine_client import ClientStatistics, EngineClient
from asyncrl.rollout.evaluation import EvalReport, report_samples, skipped_report
from asyncrl.rollout.events import Evaluated, RewardFailed
from asyncrl.rollout.generation import GroupGenerator
from asyncrl.rollout.ledger import GroupState, Ledger
from asyncrl.rollout.metrics import RolloutMetrics, measure_rollout
from asyncrl.rollout.retry import RetryPolicy
from asyncrl.rollout.rewards.pool import ProcessHost
from asyncrl.rollout.rewards.registry import resolve_reward
from asyncrl.rollout.rewards.scorer import Scorer
from asyncrl.rollout.sampling import eval_sampling, longest_prompt, training_sampling
from asyncrl.rollout.wire import SamplingParams

T = TypeVar("T")

_MIN_DROPS = 8  # groups that one get may lose even when the batch is small


@dataclass(frozen=True, slots=True)
class ExecutorStatistics:
    """A snapshot."""

    groups: Mapping[GroupState, int]
    """Groups by state, over the whole attempt."""
    drop_reasons: Mapping[str, int]
    client: ClientStatistics
    reward_failures: Mapping[str, int]
    dropped_overlong: int
    """Prompts left out of the data because they leave no room for a response."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """What `start` builds."""

    scorer: Scorer
    client: EngineClient
    generator: GroupGenerator
    stream: PromptStream
    dropped_overlong: int
    eval_prompts: tuple[Prompt, ...] | None


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
    ) -> None:
        """`host` runs the reward workers (None where there are none); their logs go to `log_dir`.

        Raises ConfigError for sampling that cannot work with this model.
        """
        self._config = config
        self._router_url = router_url
        self._host = host
        self._events = events
        self._tokenizer = tokenizer
        self._log_dir = log_dir
        self._sampling = training_sampling(config, tokenizer)
        self._eval_sampling = eval_sampling(config, self._sampling)
        self._ledger = Ledger()
        self._gathering: dict[int, anyio.CancelScope] = {}
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
        self._disposed = False

    async def start(self, task_group: TaskGroup) -> None:
        """Loads the data, imports the reward and starts its workers, which live in `task_group` until `dispose`.

        Needs no engine yet. Raises DataError, RewardError, ConfigError.
        """
        config, rollout, tokenizer = self._config, self._config.rollout, self._tokenizer
        reward = await _in_thread(lambda: resolve_reward(config.reward.function, config.reward.args))
        scorer = Scorer(reward, config.reward, host=self._host, log_dir=self._log_dir)
        self._to_close.push_async_callback(scorer.aclose)
        await scorer.start(task_group)
        prompts = await _in_thread(lambda: self._load(config.data, self._sampling, "data"))
        held_out = config.eval.data
        eval_prompts = (
            None
            if held_out is None
            else await _in_thread(lambda: self._load(held_out, self._eval_sampling, "eval.data"))
        )
        client = EngineClient(
            self._router_url,
            vocab_size=tokenizer.vocab_size,
            concurrency=rollout.concurrency,
            timeout_s=rollout.request_timeout_s,
            policy=RetryPolicy(retries=rollout.request_retries, patience_s=rollout.request_timeout_s),
            sticky=config.router.sticky,
            on_failure=self._events.emit,
        )
        self._to_close.push_async_callback(client.aclose)
        self._parts = _Parts(
            scorer=scorer,
            client=client,
            generator=GroupGenerator(client, scorer, concurrency=rollout.concurrency, vocab_size=tokenizer.vocab_size),
            stream=PromptStream(prompts.prompts, seed=config.data.seed, shuffle=config.data.shuffle),
            dropped_overlong=prompts.dropped_overlong,
            eval_prompts=None if eval_prompts is None else eval_prompts.prompts,
        )

    async def get(self, rollout_id: int) -> RolloutBatch:
        """The batch of step `rollout_id`: `prompts_per_step` groups, each with enough usable samples.

        Raises RolloutError when too many groups fail, or when the id was asked for before; RewardError when the reward
        fails on too much of the first batch.
        """
        self._ledger.check_deliverable(rollout_id)
        if rollout_id in self._gathering or self._disposed:
            raise RolloutError(f"rollout {rollout_id} is being gathered already, or the executor was disposed")
        began = time.monotonic()
        attempts_before = sum(self._started.client.statistics().failed_attempts.values())
        wanted = self._config.rollout.prompts_per_step
        collection = Collection(wanted, max_drops=max(_MIN_DROPS, 2 * wanted))
        epoch = self._started.stream.epoch
        groups = await self._gather(rollout_id, collection)
        self._events.emit(self._ledger.deliver(rollout_id, [group.group_id for group in groups]))
        self._first_batch.closed = True
        self._last_rollout = measure_rollout(
            rollout_id,
            groups,
            epoch=epoch,
            dropped_groups=collection.dropped,
            dropped_failure=collection.failure,
            failed_attempts=sum(self._started.client.statistics().failed_attempts.values()) - attempts_before,
            seconds=time.monotonic() - began,
            published_version=self._published_version,
        )
        return RolloutBatch.from_groups(rollout_id, groups, self._sampling.temperature)

    @property
    def last_rollout(self) -> RolloutMetrics:
        """Figures of the batch that `get` returned last. RolloutError before the first."""
        if self._last_rollout is None:
            raise RolloutError("no batch was delivered yet; await get() first")
        return self._last_rollout

    async def commit(self, rollout_id: int) -> None:
        """The trainer has trained the batch. RolloutError when it was never delivered, or was committed before."""
        self._events.emit(self._ledger.commit(rollout_id))

    async def eval(self, rollout_id: int) -> EvalReport:
        """Samples every held-out prompt; whatever goes wrong with that is a skipped point with a reason."""
        config, prompts, generator = self._config.eval, self._started.eval_prompts, self._started.generator
        if prompts is None:
            return skipped_report(rollout_id, "there are no held-out prompts (eval.data)")
        began = time.monotonic()
        groups: list[SampleGroup] = []
        errors: list[AsyncRLError] = []

        async def one(index: int) -> None:
            group_id = f"e{rollout_id:07d}.{index:07d}"
            try:
                group = await generator.run(group_id, prompts[index], self._eval_sampling, config.samples_per_prompt)
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
            )
        return self._told(report)

    def report_eval_skip(self, rollout_id: int, reason: str) -> EvalReport:
        """The point that an evaluation leaves which could not begin."""
        return self._told(skipped_report(rollout_id, reason))

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

    def set_weight_version(self, version: str) -> None:
        """The engines hold `version` now; samples of others count as off-version."""
        self._published_version = version

    def get_num_rollout_per_epoch(self) -> int:
        """Whole batches in one pass over the data; DataError when the data does not fill one."""
        return self._started.stream.num_rollouts_per_epoch(self._config.rollout.prompts_per_step)

    def statistics(self) -> ExecutorStatistics:
        return ExecutorStatistics(
            groups=self._ledger.counts(),
            drop_reasons=dict(self._ledger.drop_reasons),
            client=self._started.client.statistics(),
            reward_failures=dict(self._started.scorer.failures),
            dropped_overlong=self._started.dropped_overlong,
        )

    async def dispose(self) -> None:
        """Ends what is being gathered or waits to be committed, the reward workers and the connections. Idempotent."""
        self._disposed = True
        for dropped in self._ledger.drop_delivered("the job ended before they were trained"):
            self._events.emit(dropped)
        for scope in self._gathering.values():
            scope.cancel()
        await self._to_close.aclose()

    @property
    def _started(self) -> _Parts:
        if self._parts is None:
            raise RolloutError("the rollout executor was not started; await start(task_group) first")
        return self._parts

    def _load(self, data: DataConfig, sampling: SamplingParams, where: str) -> PromptSet:
        longest = longest_prompt(self._config, self._tokenizer, sampling)
        return load_prompts(data, self._tokenizer, max_prompt_tokens=longest, where=where)

    async def _gather(self, rollout_id: int, collection: Collection) -> list[SampleGroup]:
        """`collection.wanted` groups in state FINISHED; on any failure all groups drawn for them are dropped."""
        groups: list[SampleGroup | None] = [None] * collection.wanted
        drawn: set[str] = set()
        errors: list[AsyncRLError] = []

        def stop_on(error: AsyncRLError | None) -> None:
            if error is not None:
                errors.append(error)
                gathering.cancel_scope.cancel()

        def on_scored(sample: Sample) -> None:
            if sample.failure is not None:
                self._events.emit(RewardFailed(sample_id=sample.sample_id, reason=sample.failure))
            stop_on(self._first_batch.observe(sample))

        async def fill(slot: int) -> None:
            while groups[slot] is None and not errors:
                group, reason = await self._draw_group(drawn, on_scored)
                if reason is None:
                    groups[slot] = group
                else:
                    drawn.discard(group.group_id)
                    stop_on(collection.drop(reason, first_failure(group)))

        try:
            async with anyio.create_task_group() as gathering:
                self._gathering[rollout_id] = gathering.cancel_scope
                for slot in range(collection.wanted):
                    gathering.start_soon(fill, slot)
            if errors:
                raise errors[0]
            if None in groups:
                raise RolloutError(f"the executor was disposed while rollout {rollout_id} was gathered")
            drawn.clear()
        finally:
            self._gathering.pop(rollout_id, None)
            for group_id in drawn:
                self._events.emit(self._ledger.drop(group_id, "its rollout was not delivered"))
        return [group for group in groups if group is not None]

    async def _draw_group(self, drawn: set[str], on_scored: Callable[[Sample], None]) -> tuple[SampleGroup, str | None]:
        """The next prompt's group, and why it had to be dropped, if so. `drawn` gets its id on admission."""
        draw = self._started.stream.draw()
        group_id = f"{draw.ordinal:08d}"
        self._events.emit(self._ledger.admit(group_id, draw.prompt.prompt_id, draw.epoch))
        drawn.add(group_id)
        group = await self._started.generator.run(
            group_id,
            draw.prompt,
            self._sampling,
            self._config.rollout.samples_per_prompt,
            on_started=lambda: self._events.emit(self._ledger.run(group_id)),
            on_scored=on_scored,
        )
        reason = drop_reason(group, self._min_usable)
        if reason is None:
            usable = sum(sample.reward is not None for sample in group.samples)
            self._events.emit(self._ledger.finish(group_id, usable, len(group.samples) - usable))
        else:
            self._events.emit(self._ledger.drop(group_id, reason))
        return group, reason


async def _in_thread(function: Callable[[], T]) -> T:
    """Runs blocking set-up off the event loop; a cancelled job does not wait for it."""
    return await anyio.to_thread.run_sync(function, abandon_on_cancel=True)
