"""docs/names.md names things that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asyncrl import components
from asyncrl.config import Config
from asyncrl.config.placement.rules import plan_layout
from asyncrl.config.reading.schema import fields
from asyncrl.config.sections.inference import HealthConfig
from asyncrl.data.batch import RolloutBatch
from asyncrl.data.fleet import EngineState, FleetView, UpdateLease
from asyncrl.inference.controller import InferenceController
from asyncrl.rollout.evaluation import EvalReport
from asyncrl.rollout.executor import RolloutExecutor
from asyncrl.training.ranks.rank_link import LinkServer
from asyncrl.training.train_group import TrainGroup
from asyncrl.weights.publication import PublicationReport

ROOT = Path(__file__).parents[1]
TYPES = [
    *(Config, EngineState, EvalReport, FleetView, HealthConfig, InferenceController, LinkServer, PublicationReport),
    *(RolloutBatch, RolloutExecutor, TrainGroup, UpdateLease, plan_layout),
]
KNOWN = {kind.__name__: kind for kind in TYPES} | {name: getattr(components, name) for name in components.__all__}
OURS = {
    name
    for line in (ROOT / "docs" / "names.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| there")
    for name in re.findall(r"`([^`]+)`", line.split(" | ")[1])
}


@pytest.mark.parametrize("name", sorted(OURS))
def test_a_name_in_the_second_column_exists(name: str) -> None:
    owner, _, attribute = name.partition(".")
    if "/" in name:
        assert (ROOT / name).is_file()
    elif owner in KNOWN:
        assert not attribute or hasattr(KNOWN[owner], attribute)
    else:
        assert tuple(name.split(".")) in fields() or name in {spec.key for spec in fields().values()}
