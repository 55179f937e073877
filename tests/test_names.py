"""docs/names.md and docs/names_trl_verl.md name things that exist, and say which of them are awaited."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from asyncrl import components
from asyncrl.config import Config
from asyncrl.config.placement.rules import plan_layout
from asyncrl.config.reading.schema import fields
from asyncrl.config.sections.inference import HealthConfig
from asyncrl.data.batch import RolloutBatch
from asyncrl.data.fleet import EngineState, EvalFleetInfo, FleetView, UpdateLease
from asyncrl.inference.controller import InferenceController
from asyncrl.rollout.evaluation import EvalReport
from asyncrl.rollout.executor import RolloutExecutor
from asyncrl.training.ranks.rank_link import LinkServer
from asyncrl.training.train_group import TrainGroup
from asyncrl.weights.publication import PublicationReport

ROOT = Path(__file__).parents[1]
TYPES = [
    *(
        Config,
        EngineState,
        EvalFleetInfo,
        EvalReport,
        FleetView,
        HealthConfig,
        InferenceController,
        LinkServer,
        PublicationReport,
    ),
    *(RolloutBatch, RolloutExecutor, TrainGroup, UpdateLease, plan_layout),
]
KNOWN = {kind.__name__: kind for kind in TYPES} | {name: getattr(components, name) for name in components.__all__}
PAGES = [(ROOT / "docs" / name).read_text() for name in ("names.md", "names_trl_verl.md")]
ROWS = [
    line.split(" | ")
    for page in PAGES
    for line in page.splitlines()
    if line.startswith("| ") and not line.startswith("| there")
]
OURS = {name for row in ROWS for name in re.findall(r"`([^`]+)`", row[1])}
ATTRIBUTES = {"Run": {"first"}, "RolloutComponents": set()}
"""What instances have and classes do not."""
METHODS = sorted(name for name in OURS if name.partition(".")[0] in KNOWN and "." in name and "first" not in name)


@pytest.mark.parametrize("name", sorted(OURS))
def test_a_name_in_the_second_column_exists(name: str) -> None:
    owner, _, attribute = name.partition(".")
    if "/" in name:
        assert (ROOT / name).is_file()
    elif owner in KNOWN:
        assert not attribute or hasattr(KNOWN[owner], attribute) or attribute in ATTRIBUTES[owner]
    else:
        assert tuple(name.split(".")) in fields() or name in {spec.key for spec in fields().values()}


def test_each_row_says_what_it_is_here_or_that_it_is_nothing() -> None:
    assert [
        row for row in ROWS if len(row) != 3 or not (row[1] == "—" or re.fullmatch(r"(`[^`]+`(, )?)+", row[1]))
    ] == []
    assert [row[0] for row in ROWS if row[1] == "—" and row[2].strip(" |") == ""] == [], "a dash has a reason"


def test_the_methods_that_are_not_awaited_are_those_that_the_page_lists() -> None:
    """What is neither listed nor a coroutine raises TypeError under the `await` that a reader brings along."""
    [listed] = re.findall(r"called without `await`: (.*?)\.\n\n", PAGES[0], re.DOTALL)
    plain = set(re.findall(r"`([\w.]+)`", listed))
    named = {name: getattr(KNOWN[name.partition(".")[0]], name.partition(".")[2], None) for name in [*METHODS, *plain]}
    properties = {name for name, value in named.items() if isinstance(value, property)}
    calls = {name for name, value in named.items() if inspect.isroutine(value)}
    assert {name for name in calls if not inspect.iscoroutinefunction(named[name])} == plain - properties


def test_every_public_name_of_the_components_is_on_the_page() -> None:
    assert [name for name in components.__all__ if f"`{name}" not in "".join(PAGES)] == []
