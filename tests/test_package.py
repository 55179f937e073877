"""What somebody gets who installs asyncrl and has no clone: the wheel, and what `asyncrl new` writes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.new import LOOPS, write_project
from tests.loops import ENTRYPOINTS

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked as pip does."""
    place = tmp_path_factory.mktemp("wheel")
    source, site = place / "source", place / "site"
    (source / "entrypoints").mkdir(parents=True)
    for name in ("asyncrl", "entrypoints/recipes"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE", *(f"entrypoints/{loop}" for loop in LOOPS.values())):
        shutil.copy(ROOT / file, source / file)
    build = "from setuptools.build_meta import build_wheel; import sys; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(place)], cwd=source, check=True, capture_output=True)
    [wheel] = place.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    return site


def run(site: Path, directory: Path, *words: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(site), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_has_the_loops_the_recipes_and_its_types(installed: Path) -> None:
    package = installed / "asyncrl"
    assert (package / "py.typed").is_file()
    for loop in LOOPS.values():
        assert (package / loop).read_text() == (ENTRYPOINTS / loop).read_text()
    recipes = {path.name: path.read_text() for path in (ENTRYPOINTS / "recipes").glob("*.toml")}
    assert {path.name: path.read_text() for path in (package / "recipes").glob("*.toml")} == recipes
    assert "sglang.json" in {path.name for path in (package / "config" / "arguments").iterdir()}


@pytest.mark.parametrize("module", ["asyncrl.train", "asyncrl.train_async"])
def test_an_installed_loop_is_a_module(installed: Path, tmp_path: Path, module: str) -> None:
    recipe = installed / "asyncrl" / "recipes" / "demo.toml"
    assert "num_steps = 60" in run(installed, tmp_path, "-m", module, "@", str(recipe), "--dry-run")
    assert "--train.lr" in run(installed, tmp_path, "-m", module, "--help")


@pytest.mark.parametrize("loop", LOOPS)
def test_what_is_written_to_begin_with_runs_as_it_is(installed: Path, tmp_path: Path, loop: str) -> None:
    told = run(installed, tmp_path, "-c", "from asyncrl.cli import main; main()", "new", "mine", "--loop", loop)
    mine = tmp_path / "mine"
    assert sorted(path.name for path in mine.iterdir()) == sorted([LOOPS[loop], "recipe.toml", "rewards.py"])
    assert f"cd mine\npython {LOOPS[loop]} @ recipe.toml --dry-run\n" in told
    report = run(installed, mine, LOOPS[loop], "@", "recipe.toml", "--dry-run")
    assert "rewards:score" in report and "runs/first" in report
    assert "entrypoints" not in (mine / LOOPS[loop]).read_text()
    assert "runs/demo-2" not in (mine / "recipe.toml").read_text()


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds rewards\.py already"):
        write_project(tmp_path, "train")
    assert [path.name for path in tmp_path.iterdir()] == ["rewards.py"]


@pytest.mark.parametrize(("text", "reward"), [("bce", 1.0), ("bec", 0.5 / 3), ("", 0.0)])
def test_the_reward_that_is_written_prefers_the_right_answer(text: str, reward: float) -> None:
    from types import SimpleNamespace

    from asyncrl.demo.rewards import score

    assert score(SimpleNamespace(text=text), SimpleNamespace(answer="bce")) == pytest.approx(reward)  # type: ignore[arg-type]
