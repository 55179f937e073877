"""Figures that long tests find, as JSON in benchmarks/results. Tests that run for themselves write nothing there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
ASKED = "KEEP_RESULTS"
"""Environment variable with which `make test-long` asks for the files."""


def kept(name: str) -> dict[str, Any]:
    """What NAME.json holds; empty where there is none."""
    file = RESULTS / f"{name}.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


def keep(name: str, found: dict[str, Any]) -> None:
    """Writes `found` to NAME.json where `KEEP_RESULTS` is set, and prints it otherwise."""
    text = json.dumps(found, indent=1) + "\n"
    if os.environ.get(ASKED):
        (RESULTS / f"{name}.json").write_text(text)
    else:
        print(text)
