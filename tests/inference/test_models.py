"""Models that are served beside the trained one and never change."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.layout import DRIVER_NODE, EnginePlacement, RouterPlacement, ServedPlacement
from asyncrl.errors import EngineError
from asyncrl.inference.routing.router_client import RouterClient
from tests.inference.conftest import Fleet, StartFleet, cpu_layout, dispose_within, eventually
from tests.inference.engines.test_recovery import publish, serves
from tests.scripted import ScriptedEngine, ScriptedRouter, freeze, hang

pytestmark = pytest.mark.anyio

PATIENT = {"health": {"interval_s": 0.1, "timeout_s": 1.0, "failures": 2}}
"""Where a restart that nobody meant would be counted: a starved loop answers no probe within 0.2 s."""


def beside(name: str, engines: int) -> ServedPlacement:
    placements = (EnginePlacement(f"{name}-{i}", DRIVER_NODE, 1, (), "", transport="disk") for i in range(engines))
    return ServedPlacement(RouterPlacement(f"router-{name}", DRIVER_NODE), tuple(placements))


@dataclass
class Judged:
    """A fleet with a model `judge`."""

    fleet: Fleet
    judges: list[ScriptedEngine]
    router: ScriptedRouter

    def states(self) -> list[str]:
        """Of the judge's engines."""
        return [s.state.value for s in self.fleet.controller.fleet().engines if s.model == "judge"]

    def served(self) -> bool:
        return sorted(self.router.workers) == sorted(judge.url for judge in self.judges)


@asynccontextmanager
async def with_judge(
    start_fleet: StartFleet,
    *,
    engines: int = 1,
    judge: dict[str, Any] | None = None,
    exit_code: int | None = None,
    **settings: Any,
) -> AsyncIterator[Judged]:
    judges, router = [ScriptedEngine() for _ in range(engines)], ScriptedRouter()

    def prepare(fleet: Fleet) -> None:
        judges[0].exit_code = exit_code
        fleet.host.servers |= {f"judge-{i}": engine for i, engine in enumerate(judges)} | {"router-judge": router}

    layout = replace(cpu_layout(1), beside={"judge": beside("judge", engines)})
    models = {"judge": judge or {}}
    async with start_fleet(1, layout=layout, models=models, prepare=prepare, **({"restarts": 3} | settings)) as fleet:
        yield Judged(fleet, judges, router)


async def test_a_model_beside_is_served_at_once_by_its_own_router(start_fleet: StartFleet) -> None:
    async with with_judge(start_fleet, engines=2) as judged:
        fleet = judged.fleet
        await fleet.controller.wait_ready()
        await eventually(judged.served)
        assert fleet.router.workers == []  # the trained model waits for weights
        url = fleet.controller.model_url("judge")
        assert url == judged.router.url != fleet.controller.router_url
        view = fleet.controller.fleet()
        assert dict(view.model_urls) == {"judge": url}
        assert [(s.endpoint.engine_id, s.model, s.state, s.version) for s in view.engines] == [
            ("engine-0", "actor", "pending_weights", None),
            ("judge-0", "judge", "serving", None),
            ("judge-1", "judge", "serving", None),
        ]
        statistics = fleet.controller.statistics()
        assert (statistics.engines, statistics.beside) == ({"pending_weights": 1}, {"judge": {"serving": 2}})
        with pytest.raises(EngineError, match="no model is served as 'jugde'; there are: judge"):
            fleet.controller.model_url("jugde")


async def test_its_settings_are_its_own_and_the_rest_is_the_engines(start_fleet: StartFleet) -> None:
    judge = {"path": "/models/judge", "context_length": 99, "server_args": {"chunked_prefill_size": 7}}
    async with with_judge(start_fleet, judge=judge, engine={"max_total_tokens": 1000}) as judged:
        await judged.fleet.controller.wait_ready()
        argv = judged.fleet.host.specs["judge-0"].argv
        chosen = {flag: argv[argv.index(flag) + 1] for flag in argv if flag.startswith("--") and flag != argv[-1]}
        assert chosen["--model-path"] == "/models/judge"
        assert (chosen["--context-length"], chosen["--chunked-prefill-size"]) == ("99", "7")
        assert chosen["--max-total-tokens"] == "65536"


async def test_publications_pass_it_by(start_fleet: StartFleet, tmp_path: Path) -> None:
    async with with_judge(start_fleet) as judged:
        await publish(judged.fleet, "0.0", tmp_path)
        await publish(judged.fleet, "0.1", tmp_path)
        assert set(judged.judges[0].calls) <= {"ping", "generate", "health_generate"}
        assert judged.judges[0].version == "default"
        await eventually(judged.served)


async def test_a_judge_that_dies_or_hangs_is_started_again_and_the_trained_model_goes_on(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with with_judge(start_fleet, engines=2, **PATIENT) as judged:
        await publish(judged.fleet, "0.0", tmp_path)
        await judged.fleet.host.signal("judge-0", signal.SIGKILL)
        await eventually(lambda: judged.judges[0].lives == 2 and judged.served(), 20)
        judged.judges[1].script(freeze("health_generate"))
        await eventually(lambda: judged.judges[1].lives == 2 and judged.served(), 20)
        assert serves(judged.fleet, 0, "0.0")
        assert judged.fleet.engines[0].lives == 1
        assert judged.fleet.controller.statistics().restarts == 2
    assert judged.fleet.failures == []


async def test_its_router_is_kept_running_and_told_of_its_engines(start_fleet: StartFleet) -> None:
    async with with_judge(start_fleet) as judged:
        await judged.fleet.controller.wait_ready()
        await judged.fleet.host.signal("router-judge", signal.SIGKILL)
        await eventually(lambda: judged.router.lives == 2 and judged.served())


async def test_a_router_that_is_slower_than_its_engines_is_told_of_them_when_it_answers(
    start_fleet: StartFleet,
) -> None:
    async with with_judge(start_fleet) as judged:
        judged.router.faults.add(hang("workers", seconds=0.1))
        await judged.fleet.controller.wait_ready()
        await eventually(judged.served)


async def test_a_judge_that_cannot_start_ends_the_job_with_its_log(start_fleet: StartFleet) -> None:
    async with with_judge(start_fleet, exit_code=1) as judged:
        with pytest.raises(EngineError, match=r"judge-0 \(pid \d+\) exited with code 1 before its first generation"):
            await judged.fleet.controller.wait_ready()
    assert "judge-0" in str(judged.fleet.failures[0])


async def test_requests_through_its_router_are_answered(start_fleet: StartFleet) -> None:
    async with with_judge(start_fleet) as judged:
        await judged.fleet.controller.wait_ready()
        router = judged.fleet.controller._started.models.groups["judge"].routing.router
        assert isinstance(router, RouterClient)
        generation = await router.probe("default")
        assert len(generation.output_ids) == 1


async def test_disposal_ends_it_with_the_rest(start_fleet: StartFleet) -> None:
    async with with_judge(start_fleet) as judged:
        await judged.fleet.controller.wait_ready()
        await dispose_within(judged.fleet, 10)
        assert not judged.judges[0].alive and not judged.router.alive
        assert judged.states() == ["stopped"]
    assert judged.fleet.failures == []
