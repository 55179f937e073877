"""One weight publication as a transaction: begin, transfer, commit; or abort.

Invariants
- Whatever raises or is cancelled, and wherever: once `begin_weight_update` returned a lease, exactly one commit
  that succeeds or one abort follows, under a shield with a bound. The fleet itself takes care of a `begin` that
  fails, and treats an abort of a closed lease as nothing to do.
- Only engines that received every byte of this version are acknowledged; the fleet quarantines the others.
- A transfer that loses engines is repeated to the survivors inside the same transaction, a bounded number of times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import anyio
import structlog

from asyncrl.config import Config
from asyncrl.data.fleet import EngineEndpoint, UpdateAck, UpdateLease
from asyncrl.errors import EnginesLostError, WeightUpdateError
from asyncrl.observability.events import EventLog
from asyncrl.observability.waits import waiting
from asyncrl.weights.copies import Copies, CopyingSource, write_ahead
from asyncrl.weights.copy_writer import CopyWriter
from asyncrl.weights.publication_events import WeightsPublished, WeightTransferFailed, WeightUpdateFailed
from asyncrl.weights.shielding import finish_despite_cancellation
from asyncrl.weights.transfer import EngineFailure, TransferFault, TransferResult, Transport, WeightSource

_log = structlog.get_logger(__name__)


class Fleet(Protocol):
    """The inference controller as the weight plane sees it."""

    async def begin_weight_update(self, version: str) -> UpdateLease:
        """Pauses (retract), stamps `torn:<version>` and opens a session on every updatable engine."""

    async def commit_weight_update(self, lease_id: str, acks: Sequence[UpdateAck], directory: Path | None) -> None:
        """Closes sessions, verifies, stamps, continues; quarantines leased engines without an ack.

        `directory` holds a copy of the weights for engines that join later, where one was kept.
        """

    def copies_in_use(self) -> frozenset[Path]:
        """Directories of copies that are to stay as they are: published, being loaded, or pinned for an evaluation."""

    async def abort_weight_update(self, lease_id: str, failed: Mapping[str, str], *, untouched: bool) -> None:
        """Takes the engines back; nothing stays paused, nothing serves torn weights. An ended lease is nothing to do.

        Args:
            failed: engine id → reason, of engines that are lost.
            untouched: no tensor was sent, so engines go on with what they held.
        """


@dataclass(frozen=True, slots=True)
class PublicationReport:
    """One publication that was committed."""

    version: str
    seconds: float
    """The whole, the wait for the trainer thread included."""
    pause_s: float
    """From the first pause to the last continue: the longest that any engine stood still."""
    transfer_s: float
    """Transfers alone, failed ones included."""
    bytes: int
    """Payload of the last transfer, once, whatever the number of engines."""
    attempts: int
    """Transfers that were made; 1 when nothing failed."""
    engines: tuple[str, ...]
    """Engines that now serve `version`."""
    failed: Mapping[str, str]
    """Engines that were lost on the way, with the reason."""

    def metrics(self) -> dict[str, float]:
        """Numbers for metrics.jsonl."""
        return {
            "weights/publish_s": self.seconds,
            "weights/pause_s": self.pause_s,
            "weights/transfer_s": self.transfer_s,
            "weights/bytes": self.bytes,
            "weights/transfers": self.attempts,
            "weights/engines": len(self.engines),
        }


def longest_begin_s(config: Config) -> float:
    """`begin_timeout_s` of a job, in seconds: longer than the bounds of all that happens in it.

    These are the fleet's own (starts, pauses, sessions), and that of requests which are to end before.
    """
    fleet_s = config.engine.start_timeout_s + config.router.start_timeout_s + config.weights.lease_timeout_s
    return fleet_s + config.rollout.request_timeout_s


def engines_to_retry(engines: Sequence[EngineEndpoint], result: TransferResult) -> tuple[EngineEndpoint, ...]:
    """Who takes part in the next transfer: all that can still be brought to the version.

    An engine that gave no answer is out. One that refused is out as long as others remain: it would break
    their transfer again.
    """
    kinds = {engine_id: failure.kind for engine_id, failure in result.failures.items()}
    willing = tuple(e for e in engines if kinds.get(e.engine_id) not in (TransferFault.GONE, TransferFault.REFUSED))
    return willing or tuple(e for e in engines if kinds.get(e.engine_id) is TransferFault.REFUSED)


async def publish(
    fleet: Fleet,
    source: WeightSource,
    transport: Transport,
    *,
    version: str,
    attempts: int,
    events: EventLog,
    copies: Copies | None = None,
    begin_timeout_s: float = 1200.0,
    cleanup_timeout_s: float = 10.0,
    idle_timeout_s: float = 1800.0,
    abandon_timeout_s: float = 180.0,
    reserve_timeout_s: float = 600.0,
    copy_timeout_s: float = 10.0,
) -> PublicationReport:
    """Brings every updatable engine of `fleet` to the trainer's weights as `version`.

    Args:
        attempts: transfers made within one transaction before it fails, at least 1; and transactions, where one lost
            every engine: the next waits for engines that are being started again.
        copies: keeps a copy for engines that join later, where the transport leaves none by itself.
        begin_timeout_s: longest wait until engines that are being started again can take part, and every one is
            paused and has a session.
        cleanup_timeout_s: how long a cancelled commit may go on, and the end of a transfer take after a failure. For
            all that the fleet itself does, the lease says how long that may take.
        idle_timeout_s: longest wait until the trainer thread is free, before anything is paused.
        abandon_timeout_s: longest wait until a failed transfer has let go of its engines, before it is repeated.
        reserve_timeout_s: longest wait for room on the disk for a copy, before anything is paused; then there is none.
        copy_timeout_s: longest wait until a copy that was written has its name, while engines are paused.

    Raises:
        EnginesLostError: every engine was lost on the way; engines that are started again may take the next try.
        WeightUpdateError: no engine could be brought to the version; all were handed back to the fleet.
        TrainerError: a trainer rank failed in the export.
    """
    timeouts = _Timeouts(
        begin_timeout_s,
        cleanup_timeout_s,
        idle_timeout_s,
        abandon_timeout_s,
        reserve_timeout_s,
        copy_timeout_s,
    )
    for remaining in reversed(range(attempts)):
        try:
            return await _transact(fleet, source, transport, version, attempts, events, copies, timeouts)
        except EnginesLostError:
            if remaining == 0:
                raise
    raise ValueError(f"attempts must be at least 1, not {attempts}")


@dataclass(frozen=True, slots=True)
class _Timeouts:
    """In seconds; see `publish`."""

    begin: float
    cleanup: float
    idle: float
    abandon: float
    reserve: float
    copy: float


async def _transact(
    fleet: Fleet,
    source: WeightSource,
    transport: Transport,
    version: str,
    attempts: int,
    events: EventLog,
    copies: Copies | None,
    timeouts: _Timeouts,
) -> PublicationReport:
    """One transaction from the lease to its commit."""
    started = anyio.current_time()
    try:
        writer = None if copies is None or transport.leaves_copy else await _prepare(copies, fleet, source, timeouts)
        # Engines are not paused while the trainer is still busy with something else.
        await source.call(_nothing, what="turn for the weight export", timeout_s=timeouts.idle)
        directory: Path | None = None
        if copies is not None and writer is not None and writer.ahead:
            await write_ahead(source, writer)
            directory = await _name(copies, writer, version, fleet, timeouts)
        with waiting("pause and update session", "engines", timeouts.begin):
            lease = await fleet.begin_weight_update(version)
        progress = _Progress(lease.engines)
        try:
            exported = source if writer is None or writer.ahead else CopyingSource(source, writer)
            await _transfer(fleet, exported, transport, version, attempts, events, progress, timeouts.abandon)
            if transport.leaves_copy:
                directory = transport.copy
            elif copies is not None and writer is not None and not writer.ahead:
                directory = await _name(copies, writer, version, fleet, timeouts)
            acks = [UpdateAck(e.engine_id, e.generation) for e in progress.complete]
            with waiting("commit of the weights", "engines", lease.settle_s):
                # Finishing is the shortest way to a fleet that serves, so a cancellation waits for it, within bounds.
                await finish_despite_cancellation(
                    lambda: fleet.commit_weight_update(lease.lease_id, acks, directory), grace_s=timeouts.cleanup
                )
        except BaseException:
            await _hand_back(fleet, transport, lease, progress, timeouts.cleanup)
            raise
    except Exception as error:
        seconds = anyio.current_time() - started
        events.emit(WeightUpdateFailed(version=version, seconds=seconds, reason=str(error) or repr(error)))
        if isinstance(error, TimeoutError):
            raise WeightUpdateError(f"weights {version}: {error}") from error
        raise
    ended = anyio.current_time()
    report = PublicationReport(
        version=version,
        seconds=ended - started,
        pause_s=ended - lease.paused_at,
        transfer_s=progress.transfer_s,
        bytes=progress.bytes_sent,
        attempts=progress.transfers,
        engines=tuple(e.engine_id for e in progress.complete),
        failed={engine_id: failure.reason for engine_id, failure in progress.failures.items()},
    )
    events.emit(
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


async def _prepare(copies: Copies, fleet: Fleet, source: WeightSource, timeouts: _Timeouts) -> CopyWriter | None:
    """A writer that has room for a copy; None where there is to be none."""
    writer = copies.writer(source.tensor_specs)
    if writer is None:
        return None
    prepare = partial(copies.prepare, writer, fleet.copies_in_use())
    return await copies.at_disk("room for a copy of the weights", prepare, timeouts.reserve)


async def _name(copies: Copies, writer: CopyWriter, version: str, fleet: Fleet, timeouts: _Timeouts) -> Path | None:
    """The directory of the copy; None where it is not complete."""
    name = partial(copies.publish, writer, version, fleet.copies_in_use())
    return await copies.at_disk("name of the copy of the weights", name, timeouts.copy)


@dataclass(slots=True)
class _Progress:
    """What one publication has come to so far."""

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


async def _transfer(
    fleet: Fleet,
    source: WeightSource,
    transport: Transport,
    version: str,
    attempts: int,
    events: EventLog,
    progress: _Progress,
    abandon_timeout_s: float,
) -> None:
    """Repeats the transfer until it is complete for all that are left; raises WeightUpdateError if that is nobody."""
    source_error: str | None = None
    while progress.candidates and progress.transfers < attempts:
        engines = progress.candidates
        progress.transfers += 1
        began = anyio.current_time()
        touched_before, progress.touched = progress.touched, True  # unless the transfer lives to deny it
        result = await transport.transfer(source, engines, fleet.copies_in_use())
        progress.transfer_s += anyio.current_time() - began
        progress.touched = touched_before or result.touched
        progress.bytes_sent = result.bytes_sent
        progress.failures |= result.failures
        source_error = result.source_error
        if source_error is None:
            progress.complete = tuple(e for e in engines if e.engine_id not in result.failures)
            for engine in progress.complete:
                progress.failures.pop(engine.engine_id, None)
            if not result.failures:
                return
        reasons = {engine_id: failure.reason for engine_id, failure in result.failures.items()}
        events.emit(
            WeightTransferFailed(version=version, transfer=progress.transfers, engines=reasons, reason=source_error)
        )
        with waiting("end of the failed transfer", "engines", abandon_timeout_s):
            await transport.abandon(engines)
        if progress.complete:
            return
        progress.candidates = engines_to_retry(engines, result)
    told = [f"{engine_id}: {failure.reason}" for engine_id, failure in progress.failures.items()]
    told += [] if source_error is None else [f"trainer: {source_error}"]
    lost = source_error is None or all(f.kind is TransferFault.GONE for f in progress.failures.values())
    kind = EnginesLostError if progress.failures and lost and not progress.candidates else WeightUpdateError
    raise kind(f"weights {version} reached no engine in {progress.transfers} transfer(s): {'; '.join(told)}")


async def _hand_back(
    fleet: Fleet, transport: Transport, lease: UpdateLease, progress: _Progress, timeout_s: float
) -> None:
    """Frees engines that are blocked in the transfer, then gives them back; never raises, so the first error stays."""
    gone = {e: f.reason for e, f in progress.failures.items() if f.kind is TransferFault.GONE}
    with anyio.CancelScope(shield=True):
        try:
            with waiting("end of the transfer", "engines", timeout_s / 2):
                await transport.abandon(lease.engines)
        except Exception as error:
            _log.error("the transport could not leave the transfer", error=repr(error))
        try:
            with waiting("abort of the weight update", "engines", max(timeout_s, lease.settle_s)):
                await fleet.abort_weight_update(lease.lease_id, gone, untouched=not progress.touched)
        except Exception as error:
            _log.error("the fleet could not take its engines back", error=repr(error))


def _nothing() -> None:
    """The trainer thread has come to us."""
