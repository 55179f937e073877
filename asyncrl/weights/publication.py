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
from dataclasses import dataclass
from typing import Protocol

import anyio
import structlog

from asyncrl.data.fleet import EngineEndpoint, UpdateAck, UpdateLease
from asyncrl.errors import WeightUpdateError
from asyncrl.observability.events import EventLog
from asyncrl.observability.waits import waiting
from asyncrl.weights.events import WeightsPublished, WeightTransferFailed, WeightUpdateFailed
from asyncrl.weights.shielding import finish_despite_cancellation
from asyncrl.weights.transfer import FailureKind, TransferResult, Transport, WeightSource

_log = structlog.get_logger(__name__)


class Fleet(Protocol):
    """The inference controller as the weight plane sees it."""

    async def begin_weight_update(self, version: str) -> UpdateLease:
        """Pauses (retract), stamps `torn:<version>` and opens a session on every updatable engine."""

    async def commit_weight_update(self, lease_id: str, acks: Sequence[UpdateAck]) -> None:
        """Closes sessions, verifies, stamps, continues; quarantines leased engines without an ack."""

    async def abort_weight_update(self, lease_id: str, failed: Mapping[str, str]) -> None:
        """Takes the engines back; nothing stays paused and nothing serves torn weights."""


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


def engines_to_retry(engines: Sequence[EngineEndpoint], result: TransferResult) -> tuple[EngineEndpoint, ...]:
    """Who takes part in the next transfer: all that can still be brought to the version.

    An engine that gave no answer is out. One that refused is out as long as others remain: it would break
    their transfer again.
    """
    kinds = {engine_id: failure.kind for engine_id, failure in result.failures.items()}
    willing = tuple(e for e in engines if kinds.get(e.engine_id) not in (FailureKind.GONE, FailureKind.REFUSED))
    return willing or tuple(e for e in engines if kinds.get(e.engine_id) is FailureKind.REFUSED)


async def publish(
    fleet: Fleet,
    source: WeightSource,
    transport: Transport,
    *,
    version: str,
    attempts: int,
    events: EventLog,
    begin_timeout_s: float = 120.0,
    commit_timeout_s: float = 600.0,
    cleanup_timeout_s: float = 10.0,
    idle_timeout_s: float = 1800.0,
) -> PublicationReport:
    """Brings every updatable engine of `fleet` to the trainer's weights as `version`.

    Args:
        attempts: transfers made before the publication fails, at least 1.
        begin_timeout_s: longest wait until every engine is paused and has a session.
        commit_timeout_s: longest wait for session ends, verification and stamps.
        cleanup_timeout_s: bound of the clean-up after a failure or cancellation.
        idle_timeout_s: longest wait until the trainer thread is free, before anything is paused.

    Raises:
        WeightUpdateError: no engine could be brought to the version; all were handed back to the fleet.
        TrainerError: a trainer rank failed in the export.
    """
    started = anyio.current_time()
    try:
        # Engines are not paused while the trainer is still busy with something else.
        await source.call(_nothing, what="turn for the weight export", timeout_s=idle_timeout_s)
        paused_at = anyio.current_time()
        with waiting("pause and update session", "engines", begin_timeout_s):
            lease = await fleet.begin_weight_update(version)
        failed: dict[str, str] = {}
        try:
            survivors, result, tries, transfer_s = await _transfer(source, transport, lease, attempts, events, failed)
            acks = [UpdateAck(e.engine_id, e.generation) for e in survivors]
            with waiting("commit of the weights", "engines", commit_timeout_s):
                # Finishing is the shortest way to a fleet that serves, so a cancellation waits for it, within bounds.
                await finish_despite_cancellation(
                    lambda: fleet.commit_weight_update(lease.lease_id, acks), grace_s=cleanup_timeout_s
                )
        except BaseException:
            await _hand_back(fleet, transport, lease, failed, cleanup_timeout_s)
            raise
    except Exception as error:
        events.emit(
            WeightUpdateFailed(
                version=version, seconds=anyio.current_time() - started, reason=str(error) or repr(error)
            )
        )
        raise
    ended = anyio.current_time()
    report = PublicationReport(
        version=version,
        seconds=ended - started,
        pause_s=ended - paused_at,
        transfer_s=transfer_s,
        bytes=result.bytes_sent,
        attempts=tries,
        engines=tuple(e.engine_id for e in survivors),
        failed=failed,
    )
    events.emit(
        WeightsPublished(
            version=version,
            seconds=report.seconds,
            pause_s=report.pause_s,
            transfer_s=report.transfer_s,
            bytes=report.bytes,
            attempts=tries,
            engines=report.engines,
        )
    )
    return report


async def _transfer(
    source: WeightSource,
    transport: Transport,
    lease: UpdateLease,
    attempts: int,
    events: EventLog,
    failed: dict[str, str],
) -> tuple[tuple[EngineEndpoint, ...], TransferResult, int, float]:
    """Repeats the transfer until it succeeds for all that are left; returns them, the last result, tries, seconds.

    `failed` is filled with the engines that were lost for good.
    """
    engines = lease.engines
    transfer_s = 0.0
    for attempt in range(1, attempts + 1):
        if not engines:
            break
        began = anyio.current_time()
        result = await transport.transfer(source, engines)
        transfer_s += anyio.current_time() - began
        reasons = {engine_id: failure.reason for engine_id, failure in result.failures.items()}
        complete = tuple(e for e in engines if e.engine_id not in reasons and result.source_error is None)
        for engine in complete:
            failed.pop(engine.engine_id, None)
        failed.update(reasons)
        if not reasons and result.source_error is None:
            return complete, result, attempt, transfer_s
        events.emit(
            WeightTransferFailed(version=lease.version, transfer=attempt, engines=reasons, reason=result.source_error)
        )
        await transport.abandon(engines)
        if complete:
            return complete, result, attempt, transfer_s
        engines = engines_to_retry(engines, result)
    reasons = failed or {"trainer": result.source_error or "unknown"} if lease.engines else {}
    told = "; ".join(f"{who}: {why}" for who, why in reasons.items()) or "there is no engine to update"
    raise WeightUpdateError(f"weights {lease.version} reached no engine in {attempts} attempts: {told}")


async def _hand_back(
    fleet: Fleet, transport: Transport, lease: UpdateLease, failed: Mapping[str, str], timeout_s: float
) -> None:
    """Frees engines that are blocked in the transfer, then gives them back; never raises, so the first error stays."""
    with anyio.CancelScope(shield=True):
        try:
            with waiting("end of the transfer", "engines", timeout_s / 2):
                await transport.abandon(lease.engines)
        except Exception as error:
            _log.error("the transport could not leave the transfer", error=repr(error))
        try:
            with waiting("abort of the weight update", "engines", timeout_s):
                await fleet.abort_weight_update(lease.lease_id, failed)
        except Exception as error:
            _log.error("the fleet could not take its engines back", error=repr(error))


def _nothing() -> None:
    """The trainer thread has come to us."""
