"""The shape of the package that no linter knows: which way imports point, how long a module or a loop may be."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "asyncrl"
MODULES = sorted(PACKAGE.rglob("*.py"))

BASE = {"errors", "config", "data", "run_directory", "tasks"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "config": BASE,
    "data": BASE,
    "run_directory": BASE,
    "tasks": set(),
    "observability": BASE,
    "host": BASE | {"observability"},
    "exit_protocol": BASE | {"observability", "host"},
    "inference": BASE | {"observability", "host", "weights"},
    "rollout": BASE | {"observability", "host"},
    "weights": BASE | {"observability"},
    "training": BASE | {"observability", "weights"},
    "demo": BASE | {"observability"},
}
"""Sections that may import only these (and themselves); a section that is not named may import everything."""


def imported_sections(module: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(module.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "asyncrl" else [f"asyncrl.{a.name}" for a in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("asyncrl.")}
    return found


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(PACKAGE)))
def test_imports_point_one_way(module: Path) -> None:
    section = module.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if section in MAY_IMPORT:
        assert imported_sections(module) <= MAY_IMPORT[section] | {section}


def test_no_module_holds_two_ideas() -> None:
    too_long = {str(m): n for m in MODULES if (n := len(m.read_text().splitlines())) > 400}
    assert not too_long


def test_a_loop_is_read_in_one_sitting() -> None:
    loops = {loop.name: len(loop.read_text().splitlines()) for loop in (ROOT / "entrypoints").glob("*.py")}
    assert loops.keys() >= {"train.py", "train_async.py", "own_loop.py"}
    assert max(loops.values()) < 200, loops
