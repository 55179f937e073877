"""The shape of the package that no linter knows: arrows, circles, the size of folders, files, lists and loops.

`benchmarks/code_size.py` measures and defines what is counted. What does not satisfy a rule yet stands beside the rule
with its value, and must leave the list as soon as it does.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks.code_size import (
    circles,
    code_lines,
    folder_sizes,
    imports,
    parameter_counts,
    public_names,
    read_modules,
)

ROOT = Path(__file__).parents[1]
LOOPS = sorted((ROOT / "entrypoints").glob("*.py"))
MODULES = read_modules(ROOT)
IMPORTS = imports(MODULES, type_only=True)

BASE = {"errors", "config", "data", "run_directory", "tasks"}
PARTS = {"algorithms", "host", "inference", "rollout", "training", "weights"}
MAY_IMPORT: dict[str, set[str]] = {
    "asyncrl": set(),
    "errors": set(),
    "config": BASE,
    "data": BASE,
    "run_directory": BASE,
    "tasks": set(),
    "served": {"errors"},
    "algorithms": BASE,
    "observability": BASE | {"asyncrl"},
    "host": BASE | {"observability"},
    "control": BASE | {"observability"},
    "exit_protocol": BASE | {"observability", "host"},
    "weights": BASE | {"observability"},
    "inference": BASE | {"control", "observability", "host", "weights"},
    "rollout": BASE | {"algorithms", "observability", "host", "served"},
    "training": BASE | {"algorithms", "observability", "weights"},
    "demo": BASE | {"observability", "served"},
    "run": BASE | {"observability", "exit_protocol"} | PARTS - {"inference"},
    "driver": BASE | {"observability", "exit_protocol", "run"} | PARTS,
    "debugging": BASE | {"observability", "exit_protocol", "run"} | PARTS,
    "components": BASE | {"control", "observability", "debugging", "driver", "run", "served"} | PARTS,
    "evaluate": BASE | {"components"},
    "doctor": BASE | {"demo", "driver", "host", "observability"},
    "new": {"errors"},
    "cli": BASE | {"control", "doctor", "observability", "demo", "evaluate", "inference", "new"},
}
"""Section → the sections that it may import. A section is a folder or a module directly under `asyncrl/`."""

MAX_FILES, MAX_LINES, MAX_PARAMETERS, MAX_LOOP = 15, 400, 8, 45


def section(module: str) -> str:
    """`asyncrl.data.batch` → `data`."""
    return module.split(".")[1] if "." in module else module


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module: str) -> None:
    assert {section(other) for other in IMPORTS[module]} <= MAY_IMPORT[section(module)] | {section(module)}


def test_every_arrow_is_of_a_section_that_exists() -> None:
    sections = {section(module) for module in MODULES}
    assert MAY_IMPORT.keys() == sections and set().union(*MAY_IMPORT.values()) <= sections


def test_no_modules_import_each_other_in_a_circle_not_even_for_their_types() -> None:
    assert circles(IMPORTS) == []


def test_no_folder_is_searched_for_a_file() -> None:
    assert {str(folder): n for folder, n in folder_sizes(MODULES).items() if n > MAX_FILES} == {}


def test_no_module_holds_two_ideas() -> None:
    assert {name: module.lines for name, module in MODULES.items() if module.lines > MAX_LINES} == {}


def test_parameters_that_travel_together_are_one_record() -> None:
    assert {name: n for name, n in parameter_counts(MODULES).items() if n > MAX_PARAMETERS} == {}


def test_every_public_name_is_explained() -> None:
    assert [name for name, documented in public_names(MODULES).items() if not documented] == []


def test_a_loop_is_read_at_once() -> None:
    lengths = {loop.name: code_lines(loop.read_text()) for loop in LOOPS}
    assert lengths.keys() >= {"train.py", "train_async.py", "own_loop.py"}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LOOP} == {}


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.name)
def test_a_loop_imports_the_components_and_what_they_are_made_of(loop: Path) -> None:
    imported = {node.module for node in ast.walk(ast.parse(loop.read_text())) if isinstance(node, ast.ImportFrom)}
    ours = {name for name in imported if name is not None and name.startswith("asyncrl")}
    assert ours <= {"asyncrl.components", "asyncrl.data.batch"}
