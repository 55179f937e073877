"""Sections that users name: models beside the trained one, the fleet for evaluation, and which GPUs they get."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.config.machine import Machine
from asyncrl.config.placement.rules import plan_layout
from asyncrl.config.reading.report import dry_run_report
from tests.config.conftest import Load, Refused

EVAL = "[eval.data]\nsource = 'train.jsonl'\n"


def gpus(count: int, ranks: int = 1) -> Machine:
    return Machine(world_size=ranks, local_world_size=ranks, gpus=tuple(f"GPU-{i}" for i in range(count)))


@pytest.fixture
def judge(recipe: Path) -> str:
    Path("judge-model").mkdir()
    Path("judge-model/config.json").write_text(json.dumps({}))
    return "[models.judge]\npath = 'judge-model'\n"


def test_a_named_section_is_read_from_files_and_options_alike(load: Load, judge: str) -> None:
    toml = judge + "[models.judge.server_args]\nchunked_prefill_size = 128\n"
    loaded = load("--models.judge.num-engines", "2", "--models.reference.tensor-parallel", "2", toml=toml)
    assert loaded.config.models["judge"].num_engines == 2
    assert loaded.config.models["judge"].path == Path("judge-model")
    assert loaded.config.models["judge"].server_args == {"chunked_prefill_size": 128}
    assert loaded.config.models["reference"].tensor_parallel == 2
    assert loaded.sources["models.judge.path"] == "more.toml"
    assert loaded.sources["models.judge.num_engines"] == "--models.judge.num-engines"
    assert loaded.sources["models.judge.gpus"] == "default"


def test_an_empty_section_serves_the_policy_as_it_was(load: Load) -> None:
    loaded = load(toml="[models.reference]\n")
    assert loaded.config.models["reference"].path is None
    assert [engine.engine_id for engine in loaded.layout.beside["reference"].engines] == ["reference-0"]


@pytest.mark.parametrize("name", ["actor", "engine", "router", "eval", "external", "host", "reward"])
def test_a_name_that_is_taken_is_refused(refused: Refused, name: str) -> None:
    assert "is taken" in refused(toml=f"[models.{name}]\n")[f"models.{name}"]


@pytest.mark.parametrize("name", ["Judge", "'a b'", "'../x'", "'1'", "ä", "_x", "''"])
def test_a_name_that_is_none_is_refused(refused: Refused, name: str) -> None:
    written = f'"{name}"' if name == "ä" else name
    assert any("is no name for a model" in text for text in refused(toml=f"[models.{written}]\n").values())


def test_what_is_wrong_in_a_named_section_is_told_by_its_key(refused: Refused, judge: str) -> None:
    problems = refused(
        "--models.judge.num-engines", "0", "--models.other.path", "nowhere", toml=judge + "tensor_paralel = 2\n"
    )
    assert "at least 1" in problems["models.judge.num_engines"]
    assert "did you mean models.judge.tensor_parallel?" in problems["models.judge.tensor_paralel"]
    assert "holds no config.json" in problems["models.other.path"]
    assert refused("--models", "3")["--models"]
    assert "expected a table" in refused(toml="[models]\njudge = 3\n")["models.judge"]


def test_server_arguments_of_a_named_section_are_checked_and_point_into_it(refused: Refused, judge: str) -> None:
    toml = judge + "[models.judge.server_args]\ntp_size = 2\nmodel_path = 'x'\nmax_total_token = 3\n"
    problems = refused(toml=toml)
    assert problems["models.judge.server_args.tp_size"].endswith("use models.judge.tensor_parallel")
    assert problems["models.judge.server_args.model_path"].endswith("use models.judge.path")
    assert "no such server argument" in problems["models.judge.server_args.max_total_token"]


def test_the_dry_run_shows_them(load: Load, judge: str) -> None:
    report = dry_run_report(load(toml=judge + "[eval.fleet]\nnum_engines = 2\n" + EVAL))
    assert "#   judge-0      CPU              tensor parallel 1, judge-model, never updated" in report
    assert "#   router-judge CPU" in report
    assert "#   eval-1       CPU              tensor parallel 1, for evaluation, on demand" in report
    assert "[models.judge]" in report


def test_the_fleet_for_evaluation_needs_something_to_evaluate(refused: Refused) -> None:
    assert "set eval.data" in refused(toml="[eval.fleet]\n")["eval.fleet"]


def test_engines_beside_get_the_last_gpus_and_the_trained_model_what_is_left(load: Load, judge: str) -> None:
    config = load(toml=judge + "tensor_parallel = 2\n[eval.fleet]\n" + EVAL).config
    layout = plan_layout(config, gpus(7))
    assert [engine.gpus for engine in layout.engines] == [(1,), (2,), (3,)]
    assert [engine.gpus for engine in layout.beside["judge"].engines] == [(5, 6)]
    assert layout.beside["judge"].engines[0].visible_devices == "GPU-5,GPU-6"
    assert [engine.gpus for engine in layout.beside["eval"].engines] == [(4,)]
    assert layout.unused_gpus == ()


def test_named_gpus_are_taken_and_kept_from_others(load: Load, judge: str) -> None:
    config = load(toml=judge).config
    chosen = config.model_copy(update={"models": {"judge": config.models["judge"].model_copy(update={"gpus": (1,)})}})
    layout = plan_layout(chosen, gpus(4))
    assert [engine.gpus for engine in layout.beside["judge"].engines] == [(1,)]
    assert [engine.gpus for engine in layout.engines] == [(2,), (3,)]


@pytest.mark.parametrize(
    ("options", "machine", "key", "text"),
    [
        (["--models.judge.gpus", "0"], gpus(4), "models.judge.gpus", "GPU 0 is used by trainer ranks"),
        (["--models.judge.gpus", "2", "--engine.gpus", "2"], gpus(4), "models.judge.gpus", "used by engine.gpus"),
        (["--models.judge.gpus", "9"], gpus(4), "models.judge.gpus", "visible GPUs are 0 to 3"),
        (["--models.judge.gpus", "2", "3"], gpus(4), "models.judge.gpus", "list exactly those"),
        (["--models.judge.gpus", "2"], Machine(), "models.judge.gpus", "this job sees no GPU"),
        (["--models.judge.num-engines", "4"], gpus(4), "models.judge.num_engines", "would take 4, but of the"),
        ([], gpus(1), "models.judge.num_engines", "would take 1, but of the"),
        ([], gpus(2), "engine.gpus", "trainer ranks and other models use all 2 visible GPUs"),
    ],
)
def test_gpus_that_are_not_there_or_in_use_are_refused(
    refused: Refused, judge: str, options: list[str], machine: Machine, key: str, text: str
) -> None:
    assert text in refused(*options, toml=judge, machine=machine)[key]
