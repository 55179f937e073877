from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.checks.trackers import is_installed, tracker_problems
from asyncrl.config.sections.shown import TrackConfig


def test_a_tracker_whose_package_is_missing_is_told_with_the_pip_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (problem,) = tracker_problems(TrackConfig(to=("trackio",)))
    told = "trackio is not installed; run pip install trackio, or pip install 'asyncrl[trackers]' for all"
    assert str(problem.text) == told


def test_a_folder_that_a_tracker_left_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "left_by_a_run").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_installed("left_by_a_run") and is_installed("json")
