"""The end of one engine in a transfer costs that engine, and no other one."""

from __future__ import annotations

import os
import random
import signal
import statistics
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
import torch

from asyncrl.config import Config
from asyncrl.data.fleet import EngineState
from asyncrl.host import EngineHost
from asyncrl.inference import building
from asyncrl.inference.controller import InferenceController
from asyncrl.inference.engines import restarts
from asyncrl.observability.events import EventLog
from asyncrl.weights.publication import PublicationReport
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.transports.broadcast import BroadcastTransport
from tests.inference.conftest import StartFleet, cpu_layout, eventually
from tests.inference.transaction_rig import TRANSFER_S, rig, shorten_deadlines
from tests.results import keep
from tests.scripted import instead
from tests.scripted.process import command, shapes, zeros
from tests.system.jobs import command_line
from tests.weights.fakes import ThreadSource

pytestmark = pytest.mark.anyio

RECEIVE = "update_weights_from_distributed"
COMMITTED_WITHIN_S = 2.0
"""After the engine's end was known."""


@pytest.fixture(autouse=True)
def restart_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.0)


@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize("members", [2, 3, 4, 5])
async def test_one_engine_ends_in_a_transfer_at_every_position_and_the_others_go_on(
    start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch, members: int, how: str
) -> None:
    if how == "stopped":
        shorten_deadlines(monkeypatch)
    async with rig(start_fleet, engines=members, restarts=2 * members) as r:
        await r.publish("0.0")
        for position, victim in enumerate(r.fleet.engines):
            before = [engine.lives for engine in r.fleet.engines]
            strike = partial(_end_of, victim.kill if how == "killed" else victim.suspend)
            victim.script(instead(RECEIVE, strike, nth=2))
            began = anyio.current_time()
            report = await r.publish(f"0.{position + 1}")
            took_s = anyio.current_time() - began
            assert report.failed.keys() == {f"engine-{position}"} and report.attempts == 1
            assert len(report.engines) == members - 1
            assert took_s < COMMITTED_WITHIN_S + (TRANSFER_S if how == "stopped" else 0.0)
            expected = [lives + (number == position) for number, lives in enumerate(before)]
            await eventually(lambda: r.fleet.states()[position] == EngineState.PENDING_WEIGHTS)  # noqa: B023
            assert [engine.lives for engine in r.fleet.engines] == expected
            assert r.complaints() == []
            await r.publish(f"0.{position + 1}.again")


async def _end_of(end: Callable[[], None]) -> None:
    end()
    await anyio.sleep_forever()


# processes that are really killed and stopped

TENSORS = 10
BUCKET_BYTES = 2 << 20
BUCKET_TIMEOUT_S = 5.0
"""A process that was stopped is known by it."""
RANDOM_STRIKES = 18
"""For each number of members, beside one of each kind at every position."""


@dataclass(frozen=True, slots=True)
class Strike:
    """One end in a transfer."""

    members: int
    position: int
    how: str
    tensor: int
    """Before this one is exported, or `delay_s` later."""
    delay_s: float
    committed_s: float
    """From the moment in which the end was known until the publication was committed: a kill is known at once, a stop
    after the time for one bucket."""


@dataclass
class Processes:
    """A fleet of scripted engines under a real host."""

    controller: InferenceController
    events: EventLog
    source: ThreadSource
    publisher: Publisher
    host: EngineHost
    versions: int = 0

    async def publish(self) -> PublicationReport:
        self.versions += 1
        generator = torch.Generator().manual_seed(self.versions)
        self.source.tensors = {n: torch.randn(s, generator=generator) for n, s in shapes(TENSORS).items()}
        return await self.publisher.publish(f"0.{self.versions}")

    def pids(self) -> list[int]:
        """Of the engines, by position; 0 where there is no process."""
        found = {}
        for process in psutil.Process(self.host.pid).children(recursive=True):
            line = command_line(process)
            if "tests.scripted.process" in line and line[line.index("-m") + 2] == "engine":
                found[line[line.index("--port") + 1]] = process.pid
        ports = [status.endpoint.url.rpartition(":")[2] for status in self.controller.fleet().engines]
        return [found.get(port, 0) for port in ports]

    def waits_for_weights(self, position: int, former: int) -> bool:
        """Whether the engine was started again since its process was `former`, and lacks weights alone."""
        pending = self.controller.fleet().engines[position].state is EngineState.PENDING_WEIGHTS
        return pending and self.pids()[position] not in (0, former)


@asynccontextmanager
async def processes(members: int, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Processes]:
    def engine_argv(_: Any, __: Any, ports: Any, *, host: str, **more: Any) -> tuple[str, ...]:
        return command("engine", host=host, port=ports.http, tensors=TENSORS)

    def router_argv(_: Any, *, host: str, port: int, **more: Any) -> tuple[str, ...]:
        return command("router", host=host, port=port)

    monkeypatch.setattr(building, "engine_argv", engine_argv)
    monkeypatch.setattr(building, "router_argv", router_argv)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (run_dir / "model.safetensors").touch()
    events, source = EventLog(run_dir / "events.jsonl"), ThreadSource(zeros(TENSORS))
    async with EngineHost.start(run_dir / "logs") as host, anyio.create_task_group() as tasks:
        controller = InferenceController(
            Config.model_validate({"engine": {"max_restarts": 1000}}),
            hosts={0: host},
            events=events,
            layout=cpu_layout(members),
            model_path=run_dir,
            run_dir=run_dir,
        )
        await controller.start(tasks)
        transport = BroadcastTransport(
            controller.open_engine, backend="gloo", bucket_bytes=BUCKET_BYTES, timeout_s=BUCKET_TIMEOUT_S
        )
        try:
            await controller.wait_ready()
            yield Processes(controller, events, source, Publisher(controller, source, transport, events=events), host)
        finally:
            await transport.aclose()
            await controller.dispose()
            source.close()


async def strike(fleet: Processes, position: int, how: str, tensor: int, delay_s: float) -> Strike | None:
    """Strikes in the middle of a publication; returns once the engine is back and every engine serves again.

    None: the engine had everything before it was struck, so that the transfer was over for it.
    """
    before, struck_at = fleet.pids(), 0.0
    victim, signum = before[position], signal.SIGKILL if how == "killed" else signal.SIGSTOP

    def hit() -> None:
        nonlocal struck_at
        os.kill(victim, signum)
        struck_at = time.monotonic()

    def before_tensor(number: int) -> None:
        if number == tensor:
            threading.Timer(delay_s, hit).start() if delay_s else hit()

    fleet.source.before_tensor = before_tensor
    report = await fleet.publish()
    committed_at = time.monotonic()
    fleet.source.before_tensor = None
    name = f"engine-{position}"
    await eventually(lambda: struck_at > 0.0)
    known_at = struck_at + (BUCKET_TIMEOUT_S if how == "stopped" else 0.0)
    innocent = [f"engine-{number}" for number in range(len(before)) if number != position]
    assert [engine for engine in report.engines if engine != name] == innocent, dict(report.failed)
    if name in report.engines:
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    await eventually(lambda: fleet.waits_for_weights(position, victim), timeout_s=120.0)
    after = fleet.pids()
    assert [pid for number, pid in enumerate(after) if number != position] == [
        pid for number, pid in enumerate(before) if number != position
    ], "an innocent engine was restarted"
    again = await fleet.publish()
    assert len(again.engines) == len(before) and not again.failed
    if name in report.engines:
        return None
    return Strike(len(before), position, how, tensor, delay_s, round(max(0.0, committed_at - known_at), 3))


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_a_hundred_strikes_restart_the_struck_engine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, strikes = random.Random(0), list[Strike]()
    for members in (2, 3, 4, 5):
        run_dir = tmp_path / str(members)
        run_dir.mkdir()
        plan = [(position, how) for position in range(members) for how in ("killed", "stopped")]
        plan += [(draw.randrange(members), draw.choice(("killed", "stopped"))) for _ in range(RANDOM_STRIKES)]
        async with processes(members, run_dir, monkeypatch) as fleet:
            await fleet.publish()
            for position, how in plan:
                landed = None
                while landed is None:
                    tensor, delay_s = draw.randrange(len(shapes(TENSORS))), draw.choice((0.0, draw.random() * 0.005))
                    landed = await strike(fleet, position, how, tensor, delay_s)
                strikes.append(landed)
    assert len(strikes) == 100
    committed = [strike.committed_s for strike in strikes]
    summary = {
        "strikes": len(strikes),
        "innocent_engines_restarted": 0,
        "committed_s": {"median": statistics.median(committed), "most": max(committed)},
        "each": [asdict(strike) for strike in strikes],
    }
    keep("cascade_scripted", summary)
    assert max(committed) < COMMITTED_WITHIN_S
