"""`debug.train_only`: the trainer alone, on the batches that another run saved, compared with what was recorded then.

The loops stay as they are. Stand-ins answer what a loop asks of engines and executor. Nothing is generated, scored or
published, so nothing is stale either: a batch is trained as it was saved.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from asyncrl.data.batch import RolloutBatch
from asyncrl.data.fleet import FleetView, UpdateAck, UpdateLease
from asyncrl.data.saved_batch import load_batch, saved_rollouts
from asyncrl.debugging.comparison import StepComparison, compare_logprobs, compare_metrics, verdict
from asyncrl.errors import DataError, EngineError, RolloutError
from asyncrl.exit_protocol import StopRequest
from asyncrl.observability.events import EventLog, FaultSeen
from asyncrl.observability.line_file import LineFile, encode_line
from asyncrl.observability.metrics import read_metrics
from asyncrl.rollout.evaluation import EvalReport, skipped_report
from asyncrl.rollout.metrics import RolloutMetrics
from asyncrl.rollout.scheduling.deliveries import TRAINER
from asyncrl.weights.transfer import WeightReceiver

COMPARISON = "comparison.jsonl"
"""In the run directory: a line for each replayed step."""


class NoEngines:
    """Stands in for the InferenceController (`asyncrl.run.parts.InferencePart`)."""

    def fleet(self) -> FleetView:
        """Nobody."""
        return FleetView(router_url="", published_version=None, engines=())

    def open_engine(self, engine_id: str, url: str) -> AbstractAsyncContextManager[WeightReceiver]:
        """Raises EngineError."""
        raise _no_engines()

    def copies_in_use(self) -> frozenset[Path]:
        """None."""
        return frozenset()

    async def begin_weight_update(self, version: str) -> UpdateLease:
        """Raises EngineError."""
        raise _no_engines()

    async def commit_weight_update(
        self, lease_id: str, acks: Sequence[UpdateAck], directory: Path | None, *, copy_due: float | None = None
    ) -> None:
        """Raises EngineError."""
        raise _no_engines()

    def copy_written(self, directory: Path, complete: bool) -> None:
        """Nothing was committed, so no copy is awaited."""

    async def abort_weight_update(self, lease_id: str, failed: Mapping[str, str], *, untouched: bool) -> None:
        """There is nobody to take back."""

    async def wait_ready(self) -> None:
        """Nobody is waited for."""

    async def wait_publication_needed(self) -> None:
        """Nobody ever needs one."""
        await anyio.sleep_forever()

    async def wait_updatable(self) -> None:
        """Raises EngineError."""
        raise _no_engines()

    async def prepare_rollout(self, rollout_id: int) -> None:
        """Batches are there."""

    async def prepare_eval(self) -> None:
        """Raises EngineError."""
        raise _no_engines()

    async def offload(self) -> None:
        """Nobody has memory."""

    async def offload_kv(self) -> None:
        """Nobody has memory."""

    async def onload(self) -> None:
        """Nobody has memory."""

    async def onload_weights(self) -> None:
        """Nobody has memory."""

    async def onload_kv(self) -> None:
        """Nobody has memory."""


def _no_engines() -> EngineError:
    return EngineError("debug.train_only runs without engines")


class SavedRollouts:
    """Stands in for the RolloutExecutor (`asyncrl.run.parts.RolloutPart`)."""

    name: str = ""

    def __init__(self, directory: Path, stop: StopRequest) -> None:
        """The loop is asked to stop with the last batch in `directory`. Raises DataError where there is none."""
        self._directory = directory
        self._stop = stop
        self._ids = saved_rollouts(directory)
        self._last: RolloutMetrics | None = None
        if not self._ids:
            raise DataError(
                f"debug.load_rollouts: {directory} holds no saved batch; run with debug.save_rollouts first"
            )

    async def get(self, rollout_id: int, trainer: str = TRAINER) -> RolloutBatch:
        """The saved batch. RolloutError where it was not saved."""
        if rollout_id not in self._ids:
            raise RolloutError(
                f"{self._directory} holds no batch of rollout {rollout_id}, but those of {_ranges(self._ids)}; "
                "training begins where its checkpoint is (checkpoint.resume), else at 0"
            )
        saved = await anyio.to_thread.run_sync(load_batch, self._directory, rollout_id, abandon_on_cancel=True)
        self._last = _metrics_of(saved.facts, saved.batch)
        if rollout_id == self._ids[-1]:
            self._stop.request()
        return saved.batch

    @property
    def last_rollout(self) -> RolloutMetrics:
        """Figures of the batch that `get` returned last, as they were recorded."""
        assert self._last is not None, "asked before the first get"
        return self._last

    def generate_ahead(self, first: int, num_rollouts: int) -> None:
        """All batches are there."""

    async def commit(self, rollout_id: int, trainer: str = TRAINER) -> None:
        """Saved batches are in no ledger."""

    def settle(self, step: int, trainer: str = TRAINER) -> None:
        """Likewise."""

    async def save(self) -> dict[str, bytes]:
        """Nothing: the next `get` needs nothing of the last."""
        return {}

    async def restore(self, files: Mapping[str, bytes], step: int, on_reached: object = None) -> None:
        """Nothing was saved."""

    async def eval(self, rollout_id: int, hf_dir: Path | None = None) -> EvalReport:
        """A skipped point."""
        return self.report_eval_skip(rollout_id, str(_no_engines()))

    def report_eval_skip(self, rollout_id: int, reason: str) -> EvalReport:
        """The point that an evaluation leaves which could not begin."""
        return skipped_report(rollout_id, reason)

    def updating(self) -> AbstractAsyncContextManager[None]:
        """No request is in flight."""
        return nullcontext()

    def engines_paused(self) -> None:
        """No request has a deadline."""

    def engines_resumed(self) -> None:
        """Likewise."""

    def set_weight_version(self, version: str) -> None:
        """Batches say which weights made them."""

    def get_num_rollout_per_epoch(self) -> int:
        """Batches of the only epoch that there is: it ends with the last batch, wherever training begins."""
        return self._ids[-1] + 1


class Replay:
    """Compares each step with the recorded one, and tells."""

    def __init__(
        self,
        rollouts: Path,
        *,
        tolerance: float,
        report: Path,
        events: EventLog,
        note: Callable[[str], None],
    ) -> None:
        """`rollouts` lies in the directory of the recorded run, beside its metrics; `report` gets a line for each step.

        Raises RunDirectoryError where `report` cannot be written.
        """
        metrics = rollouts.resolve().parent / "metrics.jsonl"
        lines = read_metrics(metrics) if metrics.is_file() else ()
        self._recorded: dict[int, dict[str, Any]] = {
            int(line["step"]): line for line in lines if "train/tokens" in line
        }
        """By step: the last attempt's."""
        self._tolerance = tolerance
        self._report = LineFile(report)
        self._events = events
        self._note = note
        self._steps: list[StepComparison] = []

    async def step(
        self,
        batch: RolloutBatch,
        logprobs: Callable[[], Awaitable[Any]],
        train: Callable[[], Awaitable[dict[str, float]]],
    ) -> dict[str, float]:
        """Runs one training step, with the trainer's log-probs taken before it, and tells how it compares.

        `logprobs`: float32 [R], one for each response token. Returns what `train` returns.
        """
        difference = compare_logprobs(batch, await logprobs())
        metrics = await train()
        step = batch.rollout_id + 1
        compared = compare_metrics(self._recorded.get(step, {}), metrics)
        comparison = StepComparison(step, compared, difference, self._tolerance)
        self._steps.append(comparison)
        self._report.append(encode_line(comparison.as_record()))
        self._note(comparison.in_words())
        if comparison.differing:
            self._events.emit(FaultSeen(component="replay", what=comparison.in_words()))
        return metrics

    def conclude(self) -> None:
        """Ends the report, and says how the replay went as a whole."""
        self._report.close()
        if self._steps:
            self._note(f"{verdict(self._steps)}; see {self._report.path}")


def _metrics_of(facts: Mapping[str, Any], batch: RolloutBatch) -> RolloutMetrics:
    """The recorded figures; for a batch that was saved without them, those that the batch itself shows."""
    recorded = facts.get("rollout")
    needed = {f.name for f in fields(RolloutMetrics) if f.default is MISSING and f.default_factory is MISSING}
    if isinstance(recorded, Mapping) and needed <= recorded.keys() <= {f.name for f in fields(RolloutMetrics)}:
        return RolloutMetrics(**recorded)
    nothing: dict[str, Any] = dict.fromkeys(needed, 0)
    tokens = int(batch.sampled.sum())
    return RolloutMetrics(
        **nothing
        | {
            "rollout_id": batch.rollout_id,
            "groups": len(batch.group_ids),
            "samples": batch.num_samples,
            "reward_mean": float(batch.rewards.double().mean()),
            "response_tokens": tokens,
            "response_tokens_mean": tokens / max(1, batch.num_samples),
        }
    )


def _ranges(ids: tuple[int, ...]) -> str:
    """`3 to 5 and 9`: consecutive ids as ranges."""
    runs: list[list[int]] = []
    for number in ids:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = [f"{first} to {last}" if last > first else str(first) for first, last in runs]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
