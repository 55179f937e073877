"""Engines without a trainer serve what they loaded, from their first start to the last."""

from __future__ import annotations

import ast
from pathlib import Path

import anyio
import pytest
import torch

from asyncrl.components import _config_of_engines
from asyncrl.config import Config
from asyncrl.debugging.replay import NoEngines, SavedRollouts
from asyncrl.debugging.trainers import NoTrainer
from tests.inference.conftest import StartFleet, eventually, start_fleet

pytestmark = pytest.mark.anyio
__all__ = ["start_fleet"]  # a fixture
CONFIG = _config_of_engines(Config.model_validate({"debug": {"rollout_only": True}}))


async def test_nothing_is_sent_to_engines_so_nothing_is_overwritten_to_see_whether_it_arrives(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with start_fleet(
        2, tensors={"weight": torch.ones(4)}, weights=CONFIG.weights.model_dump(exclude_none=True)
    ) as fleet:
        loaded = fleet.engines[0].weights.rank_checksums()
        await fleet.controller.wait_ready()
        await NoTrainer(fleet.controller, tmp_path, 0).update_weights()
        assert fleet.states() == ["serving", "serving"]
        assert [engine.weights.rank_checksums() for engine in fleet.engines] == [loaded, loaded]


async def test_engines_that_are_started_anew_and_have_nothing_to_load_are_let_serve_again(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with start_fleet(1, restarts=3, weights=CONFIG.weights.model_dump(exclude_none=True)) as fleet:
        await fleet.controller.wait_ready()
        trainer = NoTrainer(fleet.controller, tmp_path / "removed", 0)
        for _step in range(3):
            await trainer.update_weights()
        assert fleet.kinds().count("weight_update_committed") == 1
        await fleet.host.kill("engine-0")
        with anyio.fail_after(5):
            await fleet.controller.wait_publication_needed()
        await trainer.update_weights()
        await eventually(lambda: fleet.states() == ["serving"])


ROOT = Path(__file__).parents[2]
STAND_INS = [
    (NoTrainer, {"trainer"}, {"export_hf", "finish_checkpoint", "offload", "onload", "reset_optimizer"}),
    (SavedRollouts, {"executor", "rollout_executor"}, {"eval", "set_eval_fleet", "set_weight_version"}),
    (NoEngines, {"controller", "inference_controller"}, {"offload_kv", "onload", "wait_updatable"}),
]
"""With the names under which the loops know them, and what no loop asks of half a job."""


@pytest.mark.parametrize(("stand_in", "names", "never"), STAND_INS)
def test_a_stand_in_has_all_that_a_loop_may_ask_of_it(stand_in: type, names: set[str], never: set[str]) -> None:
    """They are cast to what they stand in for, so no type checker sees to it."""
    asked: set[str] = set()
    for path in [ROOT / "asyncrl" / "phases.py", *(ROOT / "entrypoints").glob("train*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                owner = node.value
                name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", None)
                if name in names:
                    asked.add(node.attr)
    assert {name for name in asked if not hasattr(stand_in, name)} == never
