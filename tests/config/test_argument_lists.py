"""The lists of arguments that the engine and the routers take: as their own parsers say, and what if they are older."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from asyncrl.config.arguments import argument_list as lists
from asyncrl.config.arguments.argument_list import list_path
from asyncrl.config.arguments.make import PARSERS
from asyncrl.config.checks.router_args import MODULES
from tests.config.conftest import Load, Refused

ROOT = Path(__file__).parents[2]
OTHER = "--engine.server-args.brand-new-switch", "--router.args.queue-sise", "3"
MAKE = """
import sys
from asyncrl.config.arguments.make import as_text, listed
made = as_text(listed(sys.argv[1]))
sys.stdout.write(chr(0) + made)  # behind whatever the import has printed
"""


def made_anew(package: str) -> str:
    done = subprocess.run([sys.executable, "-c", MAKE, package], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout.rpartition(chr(0))[2]


@pytest.mark.parametrize("package", [pytest.param("sglang", marks=pytest.mark.system), *MODULES])
def test_a_list_is_what_the_installed_package_takes(package: str) -> None:
    told = f"run python -m asyncrl.config.arguments.make {package}"
    assert list_path(package).read_text(encoding="utf-8") == made_anew(package), told


def test_the_lists_are_of_the_versions_that_the_project_pins() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {*project["dependencies"], *project["optional-dependencies"]["smg"]}
    assert {f"{package}=={lists.argument_list(package).version}" for package in PARSERS} <= pinned


def test_the_lists_are_installed_with_the_package() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for package in PARSERS:
        path = list_path(package)
        name = ".".join(path.parent.relative_to(ROOT).parts)
        assert any(fnmatch(path.name, pattern) for pattern in data[name]), path


@pytest.mark.parametrize("package", PARSERS)
def test_a_list_is_read_without_importing_the_package(package: str) -> None:
    code = (
        "import sys; from asyncrl.config.arguments.argument_list import argument_list; "
        "print(len(argument_list(sys.argv[1]).arguments)); "
        "sys.exit(any(name in sys.modules for name in ('sglang', 'sglang_router', 'smg', 'torch')))"
    )
    done = subprocess.run([sys.executable, "-c", code, package], capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) > (400 if package == "sglang" else 90)


def test_arguments_of_another_version_are_passed_on_with_one_warning_each(
    load: Load, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(refused(*OTHER)) == {"engine.server_args.brand_new_switch", "router.args.queue_sise"}
    monkeypatch.setattr(lists, "version", lambda package: "9.9")
    config = load(*OTHER, toml="[models.judge.server_args]\nchunked_prefill_size = 'big'\n")
    assert config.config.engine.server_args == {"brand_new_switch": True}
    told = "passed on unchecked, since {} 9.9 is installed and the arguments that asyncrl knows are those of {}"
    assert config.warnings == (
        "engine.server_args, models.judge.server_args: " + told.format("sglang", "0.5.23"),
        "router.args: " + told.format("sglang-router", "0.3.2"),
    )
    assert load().warnings == ()  # nothing is passed on


def test_what_the_job_sets_itself_is_refused_of_any_version(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "version", lambda package: "9.9")
    problems = refused("--engine.server-args.tensor-parallel-size", "2", "--router.args.port", "1")
    assert problems["engine.server_args.tensor_parallel_size"].endswith("use engine.tensor_parallel")
    assert problems["router.args.port"].endswith("use router.port")


def test_arguments_of_a_package_that_is_not_there_are_checked_all_the_same(
    load: Load, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(lists, "version", missing)
    assert "did you mean" in refused("--engine.server-args.chunked-prefil-size", "1").popitem()[1]
    assert load("--engine.server-args.chunked-prefill-size", "1").warnings == ()


def test_a_warning_is_for_the_person_at_rank_0_and_leaves_a_dry_run_a_valid_recipe(recipe: Path) -> None:
    code = (
        "import sys\nfrom asyncrl.config.arguments import argument_list\n"
        "argument_list.version = lambda package: '9.9'\n"
        "from asyncrl.config.reading.loading import load_config; load_config(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, "@", "recipe.toml", "--engine.server-args.new", "1", "--dry-run"]
    for rank, told in (("0", 1), ("1", 0)):
        environ = {"RANK": rank, "WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environ)
        assert done.stderr.count("warning: engine.server_args: passed on unchecked") == told
        assert tomllib.loads(done.stdout).get("engine", {"server_args": {"new": 1}})["server_args"] == {"new": 1}
