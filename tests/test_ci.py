"""The script of continuous integration, with a `make` that only tells what it was asked; and what `make test` runs."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_old_environments_go_only_when_no_other_run_can_use_them(tmp_path: Path) -> None:
    clone, cache, tools = tmp_path / "clone", tmp_path / "cache", tmp_path / "bin"
    shutil.copytree(ROOT / ".ci", clone / ".ci")
    (clone / "requirements.lock").write_text("asyncrl\n")
    (cache / "venv-of-another-run").mkdir(parents=True)
    (cache / "models").mkdir()
    tools.mkdir()
    (tools / "make").write_text('#!/bin/sh\necho "$PYTHON $*"\n')
    (tools / "make").chmod(0o755)
    environment = os.environ | {"ASYNCRL_CI_CACHE": str(cache), "PATH": f"{tools}:{os.environ['PATH']}"}
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with subprocess.Popen(
            [clone / ".ci" / "run"], env=environment | {"PYTHON": sys.executable}, stdout=subprocess.PIPE, text=True
        ) as run:
            with pytest.raises(subprocess.TimeoutExpired):
                run.wait(timeout=1.0)
            assert (cache / "venv-of-another-run").exists()
            fcntl.flock(lock, fcntl.LOCK_UN)
            deadline = time.monotonic() + 30
            while run.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            assert run.returncode == 0 and run.stdout is not None
            words = run.stdout.read().split()
    assert words[:2] == [sys.executable, "test"] and words[2].startswith(f"VENV={cache}/venv-")
    assert sorted(path.name for path in cache.iterdir()) == ["lock", "models"]


def test_every_test_is_in_a_lane() -> None:
    """What needs an engine lies in tests/system, where nothing else lies, or is named."""
    mark = "pytest.mark." + "system"
    marked = {path for path in (ROOT / "tests").rglob("test_*.py") if mark in path.read_text()}
    assert marked >= set((ROOT / "tests" / "system").glob("test_*.py"))
    outside = {str(path.relative_to(ROOT)) for path in marked if path.parent.name != "system"}
    assert outside and outside <= set((ROOT / "Makefile").read_text().split())
