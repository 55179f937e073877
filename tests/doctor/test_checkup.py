"""The doctor's command: a recipe, the start of an engine, the report and its exit code."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl import cli
from asyncrl.config.machine import Machine
from asyncrl.config.memory.needs import JobMemory
from asyncrl.config.reading.loaded import LoadedConfig
from asyncrl.demo.model import build
from asyncrl.doctor import checkup, recipe
from asyncrl.doctor.engines import Ended, engines_start, run_command
from asyncrl.doctor.finding import Finding, failed, ok, warning
from asyncrl.driver import check_start
from tests.loops import ENTRYPOINTS

DEMO = ["@", str(ENTRYPOINTS / "recipes" / "demo.toml")]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def checked(argv: Sequence[str], machine: Machine | None = None) -> tuple[list[Finding], LoadedConfig | None]:
    return recipe.check(argv, machine or Machine.detect(), check_start)


def test_a_recipe_that_would_start_and_one_that_would_not() -> None:
    found, loaded = checked(DEMO)
    assert [f.level for f in found] == ["ok", "ok"] and loaded is not None
    assert "1 engine on cpu in float32" in found[0].seen and "is made at the start" in found[1].seen
    [wrong], nothing = checked([*DEMO, "--train.lrr", "1"])
    assert wrong.level == "failed" and nothing is None and "train.lr" in wrong.seen
    [taken], nothing = checked([*DEMO, "--train.tensor_parallel", "2"])
    assert taken.level == "failed" and "--nproc-per-node" in taken.mend
    assert checked([*DEMO, "--train.tensor_parallel", "2"], recipe.as_ranks(Machine.detect(), 2))[1] is not None


def test_a_model_of_which_a_part_is_missing_is_told() -> None:
    build(Path("runs/demo-model"))
    found, loaded = checked(DEMO)
    assert loaded is not None and "MB in 1 file" in found[-1].seen
    weights = Path("runs/demo-model/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    found, _ = checked(DEMO)
    assert found[-1].level == "failed" and str(weights.parent) in found[-1].seen
    weights.unlink()
    found, _ = checked(DEMO)
    assert found[-1].level == "failed" and "has neither model.safetensors nor" in found[-1].seen


def test_what_a_job_needs_follows_from_its_model() -> None:
    _, loaded = checked(DEMO)
    assert loaded is not None
    assert recipe.needs(loaded, 0) == recipe.needs(None, 10) == recipe.Needs()
    weights = 16_400_000_000
    base = recipe.needs(loaded, weights)
    assert base.disk_bytes == 4 * weights
    config = loaded.config
    never = config.weights.model_copy(update={"keep_published": "never"})
    saved = config.checkpoint.model_copy(update={"every": 5})
    less = replace(loaded, config=config.model_copy(update={"weights": never}))
    more = replace(loaded, config=config.model_copy(update={"checkpoint": saved}))
    assert recipe.needs(less, weights).disk_bytes == weights
    assert recipe.needs(more, weights).disk_bytes == 4 * weights + 3 * 7 * weights
    moved = replace(loaded, memory=JobMemory((), host={"copy of the published weights": weights, "state": 7}))
    assert recipe.needs(moved, weights).memory_bytes == base.memory_bytes + weights + 7


def test_an_engine_that_answers_is_told_with_its_time() -> None:
    commands: list[Sequence[str]] = []

    def run(argv: Sequence[str], timeout_s: float) -> Ended:
        commands.append(argv)
        model = Path(argv[3])
        assert (model / "config.json").exists()
        return Ended(0, "", 31.4)

    assert "in 31 s" in engines_start(run).seen
    assert commands[0][0] == sys.executable and not Path(commands[0][3]).exists()


@pytest.mark.parametrize("code", [1, None])
def test_an_engine_that_does_not_start_is_told_with_the_end_of_its_log(code: int | None) -> None:
    def run(argv: Sequence[str], timeout_s: float) -> Ended:
        logs = Path(argv[-1]) / "logs"
        logs.mkdir(parents=True)
        (logs / "engine-0.log").write_text("line\n" * 100 + "CUDA error: no kernel image\n")
        return Ended(code, "error: engine-0 ended before it was ready", 3.0)

    found = engines_start(run, 60.0)
    assert found.level == "failed" and "CUDA error: no kernel image" in found.seen and found.seen.count("line") < 20
    assert ("ended with 1" if code else "no end within 60 s") in found.seen and "--no-engine" in found.mend


def test_a_command_ends_at_its_deadline_with_what_it_said() -> None:
    ended = run_command([sys.executable, "-c", "print('begun', flush=True); import time; time.sleep(60)"], 2.0)
    assert ended.code is None and ended.output == "begun\n"
    assert run_command([sys.executable, "-c", "raise SystemExit(3)"], 30.0).code == 3


def test_the_report_has_a_line_for_each_check_and_fails_only_for_failures() -> None:
    stream = io.StringIO()
    assert checkup.show(iter([ok("a", "well"), warning("b", "so so", "do x")]), stream) == 0
    assert checkup.show(iter([failed("c", "bad\nand worse", "do y")]), stream) == 1
    told = stream.getvalue()
    assert "ok       a" in told and "→ do x" in told and "1 failed, 0 warnings, 0 ok" in told
    assert "\n" + " " * 26 + "and worse" in told


def test_settings_behind_the_recipe_are_those_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def findings(argv: Sequence[str], *, ranks: int, engine: bool) -> Iterator[Finding]:
        asked.append((tuple(argv), ranks, engine))
        yield failed("a", "b", "c")

    monkeypatch.setattr(checkup, "findings", findings)
    monkeypatch.setattr(
        sys, "argv", ["asyncrl", "doctor", "--nproc-per-node", "4", "--no-engine", *DEMO, "--train.lr", "1e-6"]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1 and asked == [((*DEMO, "--train.lr", "1e-6"), 4, False)]


def test_every_check_says_something_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert checkup.check_up(DEMO, ranks=1, engine=False) in (0, 1)
    told = capsys.readouterr().out
    for check in ("python", "packages", "driver", "shared memory", "open files", "ports", "memory", "recipe", "model"):
        assert check in told
