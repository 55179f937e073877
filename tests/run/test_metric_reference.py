"""docs/metrics.md explains every metric, and no other."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

from asyncrl.observability.metrics import PHASES, phase_name
from asyncrl.run.metric_reference import explanations, field_docstrings, reference, unexplained
from asyncrl.weights import publication
from asyncrl.weights.publication import PublicationReport

ROOT = Path(__file__).parents[2]


def test_the_page_is_that_of_the_code() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == reference()


def test_every_metric_of_the_code_has_its_section_on_the_page() -> None:
    assert {name.partition("/")[0] for name in explanations()} == {"rollout", "train", "weights", "time", "eval"}
    assert all(f"| `{name}` | " in reference() for name in explanations())


def test_a_publication_reports_what_is_explained() -> None:
    report = PublicationReport("0.1", 1.0, 0.5, 0.5, 1, 1, ("engine-0",), {})
    assert report.metrics().keys() == publication.METRICS.keys()


def test_every_phase_that_the_code_counts_is_explained() -> None:
    used = {"other"}
    for path in (ROOT / "asyncrl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "phase":
                used |= {
                    phase_name(part.value)
                    for part in ast.walk(node.args[0])
                    if isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.strip("/ ")
                }
    assert used == PHASES.keys()


def test_a_metric_without_an_explanation_is_found() -> None:
    assert unexplained({"rollout/reward_mean": 1, "train/loss": 1, "time/step_s": 1}) == set()
    assert unexplained({"rollout/reward_mode": 1, "train/loss": 1}) == {"rollout/reward_mode"}


def test_a_field_without_a_docstring_is_refused() -> None:
    @dataclass
    class Undocumented:
        told: int
        """It is told."""
        silent: int

    with pytest.raises(ValueError, match="Undocumented: no docstring under silent"):
        field_docstrings(Undocumented)
