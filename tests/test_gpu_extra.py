"""The extra for GPU machines goes with the locked packages."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
EXTRA = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["gpu"]


def test_transformer_engine_has_a_version_that_megatron_asks_for() -> None:
    [ours] = map(Requirement, EXTRA)
    asked = map(Requirement, importlib.metadata.requires("megatron-core") or [])
    [theirs] = [requirement for requirement in asked if requirement.name == ours.name]
    [pinned] = ours.specifier
    assert pinned.operator == "==" and theirs.specifier.contains(pinned.version)
    assert ours.extras == theirs.extras


@pytest.mark.long
def test_the_extra_resolves_against_the_lock_and_moves_no_package_of_it() -> None:
    pins = [line.split("==") for line in (ROOT / "requirements.lock").read_text().splitlines() if "==" in line]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--report", "-", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--constraint", str(ROOT / "requirements.lock"), *EXTRA],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    added = {item["metadata"]["name"].replace("_", "-").lower() for item in json.loads(done.stdout)["install"]}
    assert {"transformer-engine", "transformer-engine-cu13", "transformer-engine-torch"} <= added
    assert not added & {name.replace("_", "-").lower() for name, _ in pins}
