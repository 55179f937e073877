"""Publishes the trainer's weights as a transaction: begin, transfer, commit; or abort.

Invariants
- Whatever raises or is cancelled, and wherever: once `begin_weight_update` returned a lease, exactly one commit
  that succeeds or one abort follows, under a shield with a bound. The fleet itself undoes a `begin` that fails, and
  treats an abort of an ended lease as nothing to do.
- Only engines that received every byte of this version are acknowledged; the fleet quarantines the others.
- An engine that is lost costs no other one the version: engines whose transfer broke through no fault of theirs get
  it again inside the same transaction, a bounded number of times.
- A copy that a commit promised is written, or told to have failed: the fleet never waits for one in vain.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.to_thread
import structlog

from asyncrl.data.fleet import EngineEndpoint, UpdateAck, UpdateLease
from asyncrl.errors import EnginesLostError, WeightUpdateError, counted
from asyncrl.observability.events import EventLog
from asyncrl.observability.waits import waiting
from asyncrl.weights.copies import Copies
from asyncrl.weights.host_buffer import Recording
from asyncrl.weights.left_behind import leave_behind, steps_of
from asyncrl.weights.publication import Fleet, PublicationLimits, PublicationReport, engines_to_retry
from asyncrl.weights.publication_events import WeightsPublished, WeightTransferFailed, WeightUpdateFailed
from asyncrl.weights.shielding import finish_despite_cancellation
from asyncrl.weights.transfer import EngineFailure, Payload, TransferFault, TransferResult, Transport, WeightSource

_log = structlog.get_logger(__name__)


class Publisher:
    """Brings the engines of a fleet to the trainer's weights, one version after another.

        publisher = Publisher(fleet, trainer, transport, events=events, copies=copies)
        report = await publisher.publish("0.3")           # step 3 of attempt 0
        print(f"{len(report.engines)} engines stood still for {report.pause_s:.2f} s")
        await publisher.aclose()

    Args:
        fleet: an `InferenceController`, or what stands in front of one.
        source: the trainer; what it publishes is its `payload`.
        transport: how the tensors travel.
        copies: keeps a copy of each version for engines that join later, where the transport leaves none by itself.
    """

    def __init__(
        self,
        fleet: Fleet,
        source: WeightSource,
        transport: Transport,
        *,
        events: EventLog,
        copies: Copies | None = None,
        limits: PublicationLimits = PublicationLimits(),  # noqa: B008 - frozen
    ) -> None:
        self._fleet = fleet
        self._source = source
        self._transport = transport
        self._events = events
        self._copies = copies
        self._limits = limits
        self._left: tuple[str, Path] | None = None
        """Version and directory of the copy that the transport left of the last commit."""

    async def publish(self, version: str) -> PublicationReport:
        """Brings every updatable engine to the trainer's present weights, which are called `version` (`attempt.step`).

        Raises:
            EnginesLostError: every engine was lost on the way; engines that are started again may take the next try.
            WeightUpdateError: no engine could be brought to the version; all were handed back to the fleet.
            TrainerError: a trainer rank failed in the export.
        """
        lost = 0
        while True:
            try:
                return await self._transact(version)
            except EnginesLostError:
                lost += 1
                if lost == self._limits.transfers:
                    raise

    async def leave_copy(self, newer_than: int, place: Path) -> Path | None:
        """Moves the newest copy of published weights to `place`, where it outlives the job; returns its new path.

        None where no copy holds more than `newer_than` steps of training. Raises OSError. Nothing is published later.
        """
        if self._copies is not None and not self._transport.leaves_copy:
            return await self._copies.leave_newest(newer_than, place)
        left, self._left = self._left, None
        if left is None or steps_of(left[0]) <= newer_than:
            return None
        version, directory = left
        return await anyio.to_thread.run_sync(leave_behind, directory, version, place, abandon_on_cancel=True)

    async def aclose(self) -> None:
        """Gives back what the transport keeps between publications. Idempotent."""
        await self._transport.aclose()

    async def _transact(self, version: str) -> PublicationReport:
        """One transaction from the trainer's turn to the commit; tells the event log how it ended."""
        started = anyio.current_time()
        try:
            recording = await self._take_turn()
            with waiting("pause and update session", "engines", self._limits.begin_timeout_s):
                lease = await self._fleet.begin_weight_update(version)
            progress = _Progress(lease.engines)
            try:
                payload = self._source.payload if recording is None else recording.payload
                await self._transfer(version, payload, progress)
                await self._commit(lease, progress, recording)
            except BaseException:
                await self._hand_back(lease, progress)
                raise
        except Exception as error:
            seconds = anyio.current_time() - started
            self._events.emit(WeightUpdateFailed(version=version, seconds=seconds, reason=str(error) or repr(error)))
            if isinstance(error, TimeoutError):
                raise WeightUpdateError(f"weights {version}: {error}") from error
            raise
        report = progress.report(version, started, lease.paused_at)
        self._events.emit(
            WeightsPublished(
                version=version,
                seconds=report.seconds,
                pause_s=report.pause_s,
                transfer_s=report.transfer_s,
                bytes=report.bytes,
                attempts=report.attempts,
                engines=report.engines,
            )
        )
        return report

    async def _take_turn(self) -> Recording | None:
        """Waits until the trainer is free: engines are not paused before. Returns what takes a copy of the export."""
        recording = None
        if self._copies is not None and not self._transport.leaves_copy:
            recording = self._copies.record(self._source.payload)
        prepare = _nothing if recording is None else recording.reserve
        timeout_s = self._limits.turn_timeout_s
        await self._source.call(prepare, what="turn for the weight export", timeout_s=timeout_s)
        return recording

    async def _transfer(self, version: str, payload: Payload, progress: _Progress) -> None:
        """Repeats the transfer until every engine that is left has everything. Raises WeightUpdateError if none has."""
        source_error: str | None = None
        while progress.candidates and progress.transfers < self._limits.transfers:
            engines = progress.candidates
            result = await self._transfer_once(payload, progress)
            source_error = result.source_error
            if source_error is None and not result.failures:
                return
            reasons = {engine_id: failure.reason for engine_id, failure in result.failures.items()}
            self._events.emit(
                WeightTransferFailed(version=version, transfer=progress.transfers, engines=reasons, reason=source_error)
            )
            failed = [e for e in engines if source_error is not None or e.engine_id in result.failures]
            with waiting("end of the failed transfer", "engines", self._limits.abandon_timeout_s):
                await self._transport.abandon(failed)
            progress.candidates = engines_to_retry(engines, result, complete=bool(progress.complete))
        if progress.complete:
            return
        told = [f"{engine_id}: {failure.reason}" for engine_id, failure in progress.failures.items()]
        told += [] if source_error is None else [f"trainer: {source_error}"]
        lost = source_error is None or all(f.kind is TransferFault.GONE for f in progress.failures.values())
        kind = EnginesLostError if progress.failures and lost and not progress.candidates else WeightUpdateError
        raise kind(
            f"weights {version} reached no engine in {counted(progress.transfers, 'transfer')}: {'; '.join(told)}"
        )

    async def _transfer_once(self, payload: Payload, progress: _Progress) -> TransferResult:
        progress.transfers += 1
        began = anyio.current_time()
        touched_before, progress.touched = progress.touched, True  # stays so where the transfer raises
        result = await self._transport.transfer(self._source, payload, progress.candidates, self._fleet.copies_in_use())
        progress.transfer_s += anyio.current_time() - began
        progress.touched = touched_before or result.touched
        progress.bytes_sent = result.bytes_sent
        progress.failures |= result.failures
        if result.source_error is None:
            progress.complete += tuple(e for e in progress.candidates if e.engine_id not in result.failures)
            for engine in progress.complete:
                progress.failures.pop(engine.engine_id, None)
        return result

    async def _commit(self, lease: UpdateLease, progress: _Progress, recording: Recording | None) -> None:
        acks = [UpdateAck(e.engine_id, e.generation) for e in progress.complete]

        async def commit() -> None:
            if self._copies is None or recording is None or not recording.complete:
                copy = self._transport.copy
                await self._fleet.commit_weight_update(lease.lease_id, acks, copy)
                self._left = None if copy is None else (lease.version, copy)
                return
            directory = self._copies.place(lease.version, self._fleet.copies_in_use())
            due = anyio.current_time() + self._limits.copy_timeout_s
            try:
                await self._fleet.commit_weight_update(lease.lease_id, acks, directory, copy_due=due)
            except BaseException:  # a cancellation too: the lease may have been committed before it
                self._fleet.copy_written(directory, complete=False)
                raise
            self._copies.keep(recording, directory, self._fleet, due)

        with waiting("commit of the weights", "engines", lease.settle_s):
            # Finishing is the shortest way to a fleet that serves, so a cancellation waits for it, within bounds.
            await finish_despite_cancellation(commit, grace_s=self._limits.cleanup_timeout_s)

    async def _hand_back(self, lease: UpdateLease, progress: _Progress) -> None:
        """Frees engines that are blocked in the transfer, then gives them back; never raises: the first error stays."""
        timeout_s = self._limits.cleanup_timeout_s
        gone = {e: f.reason for e, f in progress.failures.items() if f.kind is TransferFault.GONE}
        with anyio.CancelScope(shield=True):
            try:
                with waiting("end of the transfer", "engines", timeout_s / 2):
                    await self._transport.abandon(lease.engines)
            except Exception as error:
                _log.error("the transport could not leave the transfer", error=repr(error))
            try:
                with waiting("abort of the weight update", "engines", max(timeout_s, lease.settle_s)):
                    await self._fleet.abort_weight_update(lease.lease_id, gone, untouched=not progress.touched)
            except Exception as error:
                _log.error("the fleet could not take its engines back", error=repr(error))


@dataclass(slots=True)
class _Progress:
    """How far one transaction has come."""

    candidates: tuple[EngineEndpoint, ...]
    """Engines of the next transfer."""
    complete: tuple[EngineEndpoint, ...] = ()
    """Engines that hold every byte."""
    failures: dict[str, EngineFailure] = field(default_factory=dict)
    """By engine_id, of engines that are not complete: what went wrong last."""
    touched: bool = False
    """Some engine may hold a part of the new weights."""
    transfers: int = 0
    transfer_s: float = 0.0
    bytes_sent: int = 0

    def report(self, version: str, started: float, paused_at: float) -> PublicationReport:
        """The transaction as it ends now, after its commit."""
        ended = anyio.current_time()
        return PublicationReport(
            version=version,
            seconds=ended - started,
            pause_s=ended - paused_at,
            transfer_s=self.transfer_s,
            bytes=self.bytes_sent,
            attempts=self.transfers,
            engines=tuple(e.engine_id for e in self.complete),
            failed={engine_id: failure.reason for engine_id, failure in self.failures.items()},
        )


def _nothing() -> None:
    """The trainer thread has come to us."""
