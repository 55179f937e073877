"""The demo keeps its promise: a policy that is right less than half of the time becomes right nearly always."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.demo import run_demo

pytestmark = [pytest.mark.system, pytest.mark.long, pytest.mark.timeout(1500)]


def test_the_demo_learns_within_ten_minutes_and_its_export_is_as_good(tmp_path: Path) -> None:
    result = run_demo(tmp_path, "demo")
    assert result["wall_s"] <= 600
    assert result["accuracy_before"] < 0.5
    assert result["accuracy_after"] > 0.9
    assert abs(result["export_accuracy"] - result["accuracy_after"]) <= 0.02


def test_without_a_learning_rate_the_demo_stays_where_it_began(tmp_path: Path) -> None:
    result = run_demo(tmp_path, "still", "--train.lr", "0")
    assert abs(result["accuracy_after"] - result["accuracy_before"]) <= 0.05
