"""Handover: gives every trainer every batch once, and measures the batch.

Invariants
- Each trainer gets each rollout id once and commits it once (`scheduling/deliveries.py`). All trainers get the same
  batch object, which is kept until the last one has got it.
- A `get` that is cancelled before its batch is taken leaves the groups to the next `get`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TypeVar

import anyio
import anyio.lowlevel

from asyncrl.config import Config
from asyncrl.data.batch import RolloutBatch
from asyncrl.data.saved_batch import ROLLOUTS, keep_batch
from asyncrl.data.staleness import Bound
from asyncrl.errors import RolloutError
from asyncrl.observability.samples.log import SampleLog
from asyncrl.observability.waits import WAITS
from asyncrl.rollout.connection import Connection
from asyncrl.rollout.metrics import DeliveryMeter, RolloutMetrics, measure_rollout
from asyncrl.rollout.scheduling.deliveries import Deliveries
from asyncrl.rollout.scheduling.group import Group
from asyncrl.rollout.scheduling.ledger import Ledger
from asyncrl.rollout.scheduling.production import Production

T = TypeVar("T")


class Handover:
    """The way of a batch from production to the trainers and back as a commit."""

    def __init__(
        self,
        config: Config,
        production: Production,
        ledger: Ledger,
        engines: Connection,
        trainers: Sequence[str],
        samples: SampleLog,
        name: str = "",
    ) -> None:
        """Every one of `trainers` trains on every batch. `engines` made the samples, and `samples` keeps some.

        `name` is that of the executor.
        """
        self._directory = config.run.dir / (f"{ROLLOUTS}-{name}" if name else ROLLOUTS)
        """Where `debug.save_rollouts` keeps batches."""
        self._config = config
        self._production = production
        self._ledger = ledger
        self._engines = engines
        self._samples = samples
        self._deliveries = Deliveries(trainers)
        self._several = len(trainers) > 1
        self._gathering = anyio.Lock()
        self._shared: dict[int, RolloutBatch] = {}
        """Batches that some trainer still has to get, by rollout id."""
        self._bound = Bound.of(config)
        self._meter = DeliveryMeter()
        self._last: RolloutMetrics | None = None
        self.published_version: str | None = None
        """Version of the weights that the engines hold; None while they count as ones that never change."""

    def generates_ahead(self) -> None:
        """From now on groups are generated also while no `get` waits."""
        self._meter.generates_ahead(time.monotonic())

    @property
    def last(self) -> RolloutMetrics:
        """Figures of the batch that was gathered last. RolloutError before the first."""
        if self._last is None:
            raise RolloutError("no batch was delivered yet; await get() first")
        return self._last

    async def get(self, rollout_id: int, trainer: str) -> RolloutBatch:
        """The batch of step `rollout_id`. Raises what `Deliveries.check_deliverable` and `Production.take` raise."""
        await anyio.lowlevel.checkpoint_if_cancelled()  # a batch that is there already is got without any other wait
        self._deliveries.check_deliverable(rollout_id, trainer)
        if not self._several:
            return await self._gather(rollout_id, trainer)
        if rollout_id not in self._shared:
            with WAITS.register("shared batch", f"rollout {rollout_id}, for {trainer}", math.inf):
                async with self._gathering:  # the first trainer gathers the batch; the others wait for it here
                    if rollout_id not in self._shared:
                        self._shared[rollout_id] = await self._gather(rollout_id, trainer)
                        return self._shared[rollout_id]
        batch = self._shared[rollout_id]
        if not self._deliveries.share(rollout_id, trainer):
            del self._shared[rollout_id]
        return batch

    def commit(self, rollout_id: int, trainer: str) -> None:
        """`trainer` has trained the batch. RolloutError when it never got it, or committed it before."""
        self._trained(rollout_id, self._deliveries.commit(rollout_id, trainer))

    def settle(self, step: int, trainer: str) -> None:
        """The job ends, and `trainer` has trained the steps before `step`; see `Deliveries.settle`."""
        self._trained(step - 1, self._deliveries.settle(step, trainer))

    def check_all_committed(self) -> None:
        """Raises RolloutError while a batch is with a trainer."""
        self._deliveries.check_all_committed()

    def end(self) -> None:
        """The job ends: batches that are with a trainer will not be committed."""
        self._deliveries.forget()

    async def _gather(self, rollout_id: int, trainer: str) -> RolloutBatch:
        began, engines = time.monotonic(), self._engines
        taken = await self._production.take(rollout_id)
        self._deliveries.deliver(rollout_id, taken.groups, trainer)
        interval = self._meter.delivered(
            began=began,
            now=time.monotonic(),
            failed_attempts=sum(engines.client.statistics().failed_attempts.values()),
            aborted_requests=engines.aborts.requests,
            measured={**engines.loads.take(), **engines.scorer.latency.take()},
        )
        version, concurrency = self.published_version, engines.slots.limit

        def deliver() -> tuple[RolloutMetrics, RolloutBatch]:
            metrics = measure_rollout(
                rollout_id, taken, interval, concurrency=concurrency, published_version=version, bound=self._bound
            )
            batch = RolloutBatch.from_groups(rollout_id, taken.samples, self._config.rollout.temperature)
            self._samples.keep_step(rollout_id + 1, taken.samples)
            if self._config.debug.save_rollouts:
                facts = {"rollout": asdict(metrics), "samples": self._samples.records(taken.samples)}
                keep_batch(batch, self._directory, facts)
            return metrics, batch

        with anyio.CancelScope(shield=True):  # it was taken: a caller that gives up would lose it
            # In a thread: a batch may hold millions of tokens, and engines are answering meanwhile.
            self._last, batch = await in_thread(deliver)
        return batch

    def _trained(self, rollout_id: int, groups: Sequence[Group] | None) -> None:
        """The last trainer committed a batch of these groups; None: other trainers still train it."""
        if groups is not None:
            self._ledger.train(rollout_id, groups)


async def in_thread(function: Callable[[], T]) -> T:
    """Runs what would hold up the event loop; a cancelled job does not wait for it."""
    return await anyio.to_thread.run_sync(function, abandon_on_cancel=True)
