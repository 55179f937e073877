"""Three real engines: the end of one in a transfer costs that engine, and no other one."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from pathlib import Path

import anyio
import psutil
import pytest
from safetensors.torch import load_file

from asyncrl.data.fleet import EngineState
from asyncrl.inference.engines import restarts
from asyncrl.weights.publication import PublicationReport
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.transports.broadcast import BroadcastTransport
from tests.inference.conftest import eventually
from tests.results import keep
from tests.system.conftest import RealFleet, private_fleet
from tests.system.jobs import command_line
from tests.system.test_recovery import processes
from tests.weights.fakes import ThreadSource

pytestmark = [pytest.mark.anyio, pytest.mark.system, pytest.mark.long]

ENGINES = 3
STRIKES = 10
BUCKET_BYTES = 32 * 1024
BUCKET_TIMEOUT_S = 8.0
"""A scheduler that was stopped is known by it."""
COMMITTED_WITHIN_S = 2.0


def schedulers(fleet: RealFleet) -> list[int]:
    """Pids of the engines' schedulers, by position; 0 where there is none."""
    found = []
    for status in fleet.controller.fleet().engines:
        pid = 0
        try:
            server = processes(fleet, status.endpoint.url.rpartition(":")[2])
            for child in server.children(recursive=True):
                if "".join(command_line(child)[:1]).startswith("sglang::scheduler"):
                    pid = child.pid
        except (AssertionError, psutil.Error):
            pass
        found.append(pid)
    return found


@pytest.mark.timeout(3000)
async def test_ten_strikes_at_schedulers_restart_the_struck_engine_alone(
    tiny_models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.0)
    draw, strikes, versions = random.Random(0), list[dict[str, object]](), 0
    source = ThreadSource(load_file(tiny_models[0] / "model.safetensors"))
    async with private_fleet(tiny_models, tmp_path, num_engines=ENGINES, max_restarts=100) as fleet:
        transport = BroadcastTransport(
            fleet.controller.open_engine, backend="gloo", bucket_bytes=BUCKET_BYTES, timeout_s=BUCKET_TIMEOUT_S
        )
        publisher = Publisher(fleet.controller, source, transport, events=fleet.events)

        async def publish() -> PublicationReport:
            nonlocal versions
            versions += 1
            return await publisher.publish(f"0.{versions}")

        async def strike(position: int, how: str, tensor: int) -> float:
            """Returns how long after the end was known the publication was committed."""
            before, struck_at = schedulers(fleet), 0.0
            assert 0 not in before

            def hit(number: int) -> None:
                nonlocal struck_at
                if number == tensor:
                    os.kill(before[position], signal.SIGKILL if how == "killed" else signal.SIGSTOP)
                    struck_at = time.monotonic()

            source.before_tensor = hit
            report = await publish()
            committed_s = time.monotonic() - struck_at - (BUCKET_TIMEOUT_S if how == "stopped" else 0.0)
            source.before_tensor = None
            name = f"engine-{position}"
            assert report.failed.keys() == {name} and len(report.engines) == ENGINES - 1, dict(report.failed)

            def is_back() -> bool:
                state = fleet.controller.fleet().engines[position].state
                return state is EngineState.PENDING_WEIGHTS and schedulers(fleet)[position] not in (0, before[position])

            await eventually(is_back, timeout_s=400.0)
            after = schedulers(fleet)
            assert [pid for pid in before if pid in after] == [pid for pid in before if pid != before[position]]
            assert len((await publish()).engines) == ENGINES
            return max(0.0, committed_s)

        try:
            assert len((await publish()).engines) == ENGINES
            plan = [(position, how) for position in range(ENGINES) for how in ("killed", "stopped")]
            plan += [(draw.randrange(ENGINES), draw.choice(("killed", "stopped"))) for _ in range(STRIKES - len(plan))]
            for position, how in plan:
                tensor = draw.randrange(len(source.tensors))
                committed_s = await strike(position, how, tensor)
                strikes.append(
                    {"position": position, "how": how, "tensor": tensor, "committed_s": round(committed_s, 3)}
                )
        finally:
            with anyio.CancelScope(shield=True):
                await transport.aclose()
            source.close()
        assert fleet.failures == []
    committed = [float(str(strike["committed_s"])) for strike in strikes]
    summary = {
        "engines": ENGINES,
        "strikes": len(strikes),
        "innocent_engines_restarted": 0,
        "committed_s": {"median": statistics.median(committed), "most": max(committed)},
        "each": strikes,
    }
    keep("cascade_real", summary)
    assert max(committed) < COMMITTED_WITHIN_S
