"""The publication transaction: whatever fails, wherever, nothing stays paused and the next publication succeeds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from asyncrl.config import Config
from asyncrl.data.fleet import EngineEndpoint
from asyncrl.errors import TrainerError, WeightUpdateError
from asyncrl.observability.events import EventLog
from asyncrl.observability.waits import WAITS
from asyncrl.weights.copies import Copies
from asyncrl.weights.publication import PublicationLimits, PublicationReport, engines_to_retry
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.shielding import finish_despite_cancellation
from asyncrl.weights.transfer import EngineFailure, Payload, TransferFault, TransferResult, WeightSource
from tests.weights.conftest import MakeCopies
from tests.weights.fakes import AccountingFleet, Nowhere, ThreadSource

ENGINES = tuple(EngineEndpoint(f"engine-{i}", 1, f"http://engine-{i}", 1) for i in range(3))
GONE, REFUSED, COLLATERAL = (EngineFailure(kind, f"it was {kind}") for kind in TransferFault)


@dataclass
class ScriptedTransport:
    """Answers transfers with `results`, one after another, then with success; exports first where `exports`."""

    results: list[TransferResult] = field(default_factory=list)
    asked: list[tuple[str, ...]] = field(default_factory=list)
    hooks: dict[str, Callable[[], Awaitable[None]]] = field(default_factory=dict)
    in_transfer: set[str] = field(default_factory=set)

    leaves_copy: bool = False
    exports: bool = False
    in_use: list[Collection[Path]] = field(default_factory=list)

    @property
    def copy(self) -> Path | None:
        return None

    async def transfer(
        self,
        source: WeightSource,
        payload: Payload,
        engines: Sequence[EngineEndpoint],
        in_use: Collection[Path] = (),
    ) -> TransferResult:
        if self.exports:
            await payload.export(Nowhere(), 5.0)
        self.in_use.append(in_use)
        self.asked.append(tuple(e.engine_id for e in engines))
        self.in_transfer = {e.engine_id for e in engines}
        await self._hook("transfer")
        result = self.results.pop(0) if self.results else TransferResult(1000)
        if not result.failures and result.source_error is None:
            self.in_transfer = set()
        return result

    async def abandon(self, engines: Sequence[EngineEndpoint]) -> None:
        self.in_transfer = set()
        await self._hook("abandon")

    async def aclose(self) -> None:
        pass

    async def _hook(self, name: str) -> None:
        if name in self.hooks:
            await self.hooks[name]()


@pytest.fixture
def fleet() -> AccountingFleet:
    return AccountingFleet(ENGINES)


async def run(
    fleet: AccountingFleet,
    source: ThreadSource,
    transport: ScriptedTransport,
    events: EventLog,
    version: str = "0.1",
    copies: Copies | None = None,
    *,
    timeout_s: float = 5.0,
    copy_timeout_s: float = 60.0,
) -> PublicationReport:
    """Short timeouts are for what hangs: anything else may take as long as a busy machine makes it."""
    limits = PublicationLimits(
        transfers=2,
        turn_timeout_s=timeout_s,
        begin_timeout_s=timeout_s,
        abandon_timeout_s=timeout_s,
        cleanup_timeout_s=timeout_s,
        copy_timeout_s=copy_timeout_s,
    )
    return await Publisher(fleet, source, transport, events=events, copies=copies, limits=limits).publish(version)


async def test_a_publication_reports_what_it_did(
    fleet: AccountingFleet, source: ThreadSource, events: EventLog
) -> None:
    report = await run(fleet, source, ScriptedTransport(), events)
    assert report.engines == ("engine-0", "engine-1", "engine-2")
    assert (report.version, report.attempts, report.bytes, dict(report.failed)) == ("0.1", 1, 1000, {})
    assert 0 <= report.transfer_s <= report.pause_s <= report.seconds
    assert set(fleet.serving.values()) == {"0.1"}
    published = events.recent[-1]
    assert published["kind"] == "weights_published"
    assert published["engines"] == ("engine-0", "engine-1", "engine-2") or published["engines"] == [
        "engine-0",
        "engine-1",
        "engine-2",
    ]


@pytest.mark.parametrize("how", ["raise", "raise our own", "hang", "cancel"])
@pytest.mark.parametrize("step", ["idle", "begin", "transfer", "second transfer", "abandon", "commit", "abort"])
async def test_nothing_stays_paused_and_the_next_publication_succeeds(
    step: str, how: str, fleet: AccountingFleet, source: ThreadSource, events: EventLog
) -> None:
    transport = ScriptedTransport()
    scope = anyio.CancelScope()

    async def fault() -> None:
        if how == "raise":
            raise RuntimeError("a defect")
        if how == "raise our own":
            raise TrainerError("trainer rank 1: boom")
        if how == "cancel":
            scope.cancel()
        elif step in ("idle", "transfer", "second transfer"):  # these have deadlines of their own; a stop has one too
            scope.deadline = anyio.current_time() + 0.05
        await anyio.sleep_forever()

    async def fault_in_second() -> None:
        if len(transport.asked) == 2:
            await fault()

    lost_once = [TransferResult(0, {"engine-1": GONE}, "connection reset")]
    if step == "idle":
        original, source.call = source.call, lambda *_, **__: fault()  # type: ignore[method-assign, assignment]
    elif step in ("begin", "commit"):
        fleet.hooks[step] = fault
    elif step == "transfer":
        transport.hooks["transfer"] = fault
    elif step == "second transfer":
        transport.results, transport.hooks["transfer"] = lost_once, fault_in_second
    elif step == "abandon":
        transport.results, transport.hooks["abandon"] = lost_once, fault
    else:
        transport.results = [TransferResult(0, {e.engine_id: COLLATERAL for e in ENGINES}, "broken")] * 2
        fleet.hooks["abort"] = fault

    succeeded = False
    settle_s, fleet.settle_s = fleet.settle_s, 0.2
    with anyio.fail_after(10.0), scope:
        try:
            await run(fleet, source, transport, events, timeout_s=0.2)
            succeeded = True
        except (RuntimeError, TrainerError, WeightUpdateError, TimeoutError):
            pass

    assert not succeeded
    assert fleet.lease is None and not fleet.paused and not transport.in_transfer
    assert not WAITS.snapshot()

    if step == "idle":
        source.call = original  # type: ignore[method-assign]
    fleet.settle_s = settle_s
    fleet.hooks.clear()
    transport.hooks.clear()
    transport.results = []
    report = await run(fleet, source, transport, events, version="0.2")
    assert set(report.engines) == {e.engine_id for e in ENGINES} - set(fleet.lost)
    assert {fleet.serving[engine_id] for engine_id in report.engines} == {"0.2"}


async def test_survivors_are_served_inside_the_same_transaction(
    fleet: AccountingFleet, source: ThreadSource, events: EventLog
) -> None:
    broken = TransferResult(
        400, {"engine-0": COLLATERAL, "engine-1": GONE, "engine-2": COLLATERAL}, "connection reset by peer"
    )
    transport = ScriptedTransport([broken])
    report = await run(fleet, source, transport, events)
    assert transport.asked == [("engine-0", "engine-1", "engine-2"), ("engine-0", "engine-2")]
    assert report.engines == ("engine-0", "engine-2") and report.attempts == 2
    assert dict(report.failed) == {"engine-1": GONE.reason}
    assert fleet.leases == 1 and not fleet.aborts
    assert fleet.lost.keys() == {"engine-1"}, "the fleet quarantines what was not acknowledged"
    assert [e["kind"] for e in events.recent] == ["weight_transfer_failed", "weights_published"]


async def test_who_suffered_gets_the_weights_although_others_hold_them_already(
    fleet: AccountingFleet, source: ThreadSource, events: EventLog
) -> None:
    broken = TransferResult(1000, {"engine-1": GONE, "engine-2": COLLATERAL})
    transport = ScriptedTransport([broken])
    report = await run(fleet, source, transport, events)
    assert transport.asked == [("engine-0", "engine-1", "engine-2"), ("engine-2",)]
    assert report.engines == ("engine-0", "engine-2") and fleet.lost.keys() == {"engine-1"}

    transport = ScriptedTransport([TransferResult(1000, {"engine-2": COLLATERAL})] * 2)
    report = await run(fleet, source, transport, events, version="0.2")
    assert report.engines == ("engine-0",), "what engines hold is published, whatever comes of the others"


async def test_engines_that_hold_everything_are_not_sent_it_twice(
    fleet: AccountingFleet, source: ThreadSource, events: EventLog
) -> None:
    transport = ScriptedTransport([TransferResult(1000, {"engine-2": REFUSED})])
    report = await run(fleet, source, transport, events)
    assert len(transport.asked) == 1
    assert report.engines == ("engine-0", "engine-1")


async def test_only_engines_that_are_gone_are_given_up_when_everything_failed(
    fleet: AccountingFleet, source: ThreadSource, events: EventLog
) -> None:
    first = TransferResult(0, {"engine-0": COLLATERAL, "engine-1": GONE, "engine-2": REFUSED}, "broken")
    second = TransferResult(0, {"engine-0": COLLATERAL}, "broken again")
    with pytest.raises(WeightUpdateError, match=r"weights 0\.1 reached no engine in 2 transfers.*broken again"):
        await run(fleet, source, ScriptedTransport([first, second]), events)
    assert [(dict(failed), untouched) for failed, untouched in fleet.aborts] == [({"engine-1": GONE.reason}, False)]
    assert events.recent[-1]["kind"] == "weight_update_failed"


async def test_engines_keep_what_they_hold_when_no_tensor_was_sent(
    fleet: AccountingFleet, source: ThreadSource, events: EventLog
) -> None:
    await run(fleet, source, ScriptedTransport(), events)
    nothing = TransferResult(0, {"engine-1": COLLATERAL}, "the group did not form", touched=False)
    with pytest.raises(WeightUpdateError):
        await run(fleet, source, ScriptedTransport([nothing, nothing]), events, version="0.2")
    assert fleet.aborts == [({}, True)]
    assert set(fleet.serving.values()) == {"0.1"}


@pytest.mark.parametrize(
    ("kinds", "again"),
    [
        ({}, (0, 1, 2)),
        ({1: GONE}, (0, 2)),
        ({0: COLLATERAL, 1: GONE, 2: COLLATERAL}, (0, 2)),
        ({0: COLLATERAL, 1: REFUSED, 2: COLLATERAL}, (0, 2)),
        ({0: REFUSED, 1: GONE, 2: REFUSED}, (0, 2)),
        ({0: GONE, 1: GONE, 2: GONE}, ()),
    ],
)
def test_who_is_tried_again(kinds: Mapping[int, EngineFailure], again: tuple[int, ...]) -> None:
    result = TransferResult(0, {f"engine-{i}": failure for i, failure in kinds.items()}, "broken")
    assert [e.engine_id for e in engines_to_retry(ENGINES, result)] == [f"engine-{i}" for i in again]
    suffered = [f"engine-{i}" for i, failure in kinds.items() if failure is COLLATERAL]
    assert [e.engine_id for e in engines_to_retry(ENGINES, result, complete=True)] == suffered


async def test_a_transport_that_leaves_a_copy_is_not_copied_a_second_time(
    fleet: AccountingFleet, source: ThreadSource, events: EventLog, tmp_path: Path, make_copies: MakeCopies
) -> None:
    transport = ScriptedTransport(leaves_copy=True, exports=True)
    await run(fleet, source, transport, events, copies=make_copies(tmp_path / "published"))
    assert not (tmp_path / "published").exists()


async def test_every_transfer_hears_which_copies_are_in_use(
    fleet: AccountingFleet, source: ThreadSource, events: EventLog, tmp_path: Path
) -> None:
    transport = ScriptedTransport([TransferResult(0, {}, "broken")])
    fleet.in_use = frozenset({tmp_path / "pinned"})
    await run(fleet, source, transport, events)
    assert transport.in_use == [fleet.in_use, fleet.in_use]


async def test_a_cancelled_commit_is_finished(fleet: AccountingFleet, source: ThreadSource, events: EventLog) -> None:
    with anyio.CancelScope() as scope:

        async def cancel() -> None:
            scope.cancel()

        fleet.hooks["commit"] = cancel
        await run(fleet, source, ScriptedTransport(), events)
    assert scope.cancelled_caught
    assert set(fleet.serving.values()) == {"0.1"} and not fleet.aborts


def test_a_publication_waits_as_long_for_engines_that_start_as_they_may_take() -> None:
    config = Config.model_validate({"engine": {"start_timeout_s": 7200.0}, "weights": {"attempts": 3}})
    limits = PublicationLimits.of(config)
    assert limits.begin_timeout_s > 7200.0 + config.router.start_timeout_s
    assert limits.transfers == 3


def test_no_limit_says_that_nothing_is_to_be_tried() -> None:
    with pytest.raises(ValueError, match="transfers must be at least 1, not 0"):
        PublicationLimits(transfers=0)


async def test_finishing_despite_a_cancellation_is_bounded_and_tells() -> None:
    told: list[str] = []
    with anyio.fail_after(10.0), anyio.CancelScope() as scope:
        scope.cancel()
        await finish_despite_cancellation(anyio.sleep_forever, grace_s=0.05, on_cancel=lambda: told.append("cancelled"))
    assert scope.cancelled_caught and told == ["cancelled"]


async def test_finishing_undisturbed_returns_the_value_or_raises_the_error() -> None:
    told: list[str] = []

    async def seven() -> int:
        await anyio.lowlevel.checkpoint()
        return 7

    async def fail() -> None:
        raise KeyError("x")

    assert await finish_despite_cancellation(seven, grace_s=1.0, on_cancel=lambda: told.append("cancelled")) == 7
    with pytest.raises(KeyError):
        await finish_despite_cancellation(fail, grace_s=1.0, on_cancel=lambda: told.append("cancelled"))
    assert not told
