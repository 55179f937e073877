"""A dry run with `--as` needs no device and no weights; it prints the memory, and refuses what does not fit."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.config.machine import Machine
from asyncrl.config.memory.sized import BUDGET, FITTED
from asyncrl.config.problems import InvalidConfigError
from asyncrl.config.reading.loaded import LoadedConfig
from asyncrl.config.reading.loading import load_config, parse_command_line, resolve
from asyncrl.config.reading.report import dry_run_report
from asyncrl.driver import check_start
from tests.tiny_policy import write_policy

MODELS = Path(__file__).parents[1] / "models"
GPUS = Machine(world_size=4, local_world_size=4, gpus=tuple("01234567"), gpu_bytes=80 * 10**9)


def plan(recipe: Path, model: str, *argv: str, machine: Machine | None = None, dry_run: bool = True) -> LoadedConfig:
    (recipe.parent / "model" / "config.json").write_text((MODELS / model / "config.json").read_text())
    return resolve(parse_command_line(["@", recipe.name, *argv]), machine or Machine(), dry_run=dry_run)


def refusal(recipe: Path, model: str, *argv: str, machine: Machine | None = None, dry_run: bool = True) -> str:
    with pytest.raises(InvalidConfigError) as caught:
        plan(recipe, model, *argv, machine=machine, dry_run=dry_run)
    [problem] = caught.value.problems
    assert problem.key == "GPU memory"
    return problem.text


def test_the_table_fits_a_terminal_and_names_what_each_gpu_holds(recipe: Path) -> None:
    loaded = plan(recipe, "qwen3-8b", "--dry-run", "--as", "8xH200", "--engine.colocate", "true")
    report = dry_run_report(loaded).splitlines()
    start = next(i for i, line in enumerate(report) if line.startswith("# memory in GB for each GPU"))
    table = report[start : report.index("", start)]
    assert max(map(len, table)) <= 104
    for words in (
        "weight  grads   Adam activ. logits     KV graphs buffer  other    sum     of",
        "handover of weights",
    ):
        assert any(words in line for line in table), table
    assert any(re.search(r"one rank can train sequences of up to \d+ tokens", line) for line in table)
    assert "# planned for 8xH200, which is not this machine: there, start with torchrun --nproc-per-node 8" in table


@pytest.mark.parametrize(
    ("model", "argv", "fix"),
    [
        ("qwen3-8b", ("--as", "8x80GB"), "train.tensor_parallel = 2 would fit"),
        (
            "qwen3-8b",
            ("--as", "8x80GB", "--train.tensor-parallel", "2", "--model.context-length", "8192"),
            "train.recompute = mlp would fit",
        ),
        (
            "qwen3-8b",
            ("--as", "8x80GB", "--train.tensor-parallel", "2", "--train.max-tokens-per-microbatch", "16384"),
            "train.max_tokens_per_microbatch left unset would fit",
        ),
        (
            "qwen3-8b",
            ("--as", "8x80GB", "--engine.colocate", "true"),
            "engine.colocate_memory_peak_device = cpu would fit",
        ),
        ("qwen3-8b", ("--as", "1x80GB"), "train.optimizer_on_host = true would fit"),
        ("qwen3-32b", ("--as", "8x24GB"), "no setting makes it fit on this machine"),
    ],
)
def test_what_cannot_fit_is_refused_with_the_setting_that_makes_it_fit(
    recipe: Path, model: str, argv: tuple[str, ...], fix: str
) -> None:
    text = refusal(recipe, model, "--dry-run", *argv)
    assert fix in text
    assert "\n" not in text


def test_the_setting_that_is_named_is_one_with_which_the_plan_goes_through(recipe: Path) -> None:
    argv = ("--dry-run", "--as", "8x80GB")
    fix = refusal(recipe, "qwen3-32b", *argv)
    changes = re.findall(r"([a-z_]+\.[a-z_]+) = (\w+)", fix)
    assert changes
    loaded = plan(recipe, "qwen3-32b", *argv, *(word for key, value in changes for word in (f"--{key}", value)))
    assert loaded.memory is not None and loaded.memory.worst is None


def test_a_reference_takes_its_weights_on_every_rank(recipe: Path) -> None:
    argv = ("--dry-run", "--train.tensor-parallel", "4")
    alone, held = (plan(recipe, "qwen3-8b", *argv, *kl, machine=GPUS).memory for kl in ((), ("--algorithm.kl", "loss")))
    assert alone is not None and held is not None
    assert held.devices[0].parts["weights"] == 2 * alone.devices[0].parts["weights"]


def test_host_memory_that_is_not_there_is_refused_in_a_plan_of_this_machine(recipe: Path) -> None:
    small = replace(GPUS, host_bytes=10**9)
    argv = ("--dry-run", "--train.tensor-parallel", "4")
    with pytest.raises(InvalidConfigError, match=r"host memory: the node of rank 0 has 1\.0 GB") as caught:
        plan(recipe, "qwen3-8b", *argv, machine=small)
    assert [problem.key for problem in caught.value.problems] == ["host memory"]
    plan(recipe, "qwen3-8b", *argv, machine=small, dry_run=False)


def test_a_start_is_refused_where_the_model_alone_is_more_than_the_gpu_holds(recipe: Path) -> None:
    small = Machine(world_size=4, local_world_size=4, gpus=tuple("01234567"), gpu_bytes=24 * 10**9)
    assert "before any activation" in refusal(recipe, "qwen3-8b", machine=small, dry_run=False)
    argv = ("--train.tensor-parallel", "4", "--train.max-tokens-per-microbatch", "8192")
    plan(recipe, "qwen3-8b", *argv, machine=GPUS, dry_run=False)  # an estimate alone refuses no start


def test_the_packing_budget_is_what_fits_and_holds_the_longest_sequence(recipe: Path) -> None:
    loaded = plan(recipe, "qwen3-8b", "--train.tensor-parallel", "2", machine=GPUS, dry_run=False)
    assert loaded.memory is not None
    assert loaded.config.train.packing_budget == loaded.config.train.max_tokens_per_microbatch == loaded.memory.tokens
    assert 1024 < loaded.config.train.packing_budget < 32768
    assert loaded.sources[BUDGET] == FITTED
    long = ("--model.context-length", "40960", "--train.recompute", "full")
    assert plan(recipe, "qwen3-0.6b", *long, machine=GPUS, dry_run=False).config.train.packing_budget == 40960
    argv = ("--train.tensor-parallel", "2", "--model.context-length", "40960")
    text = refusal(recipe, "qwen3-8b", *argv, machine=GPUS, dry_run=False)
    assert re.match(r"one rank can train sequences of about \d+ tokens, and the longest has 40960 ", text)
    plan(recipe, "qwen3-8b", *argv, f"--{BUDGET}", "40960", machine=GPUS, dry_run=False)


def test_a_model_that_is_built_at_the_start_leaves_every_rank_the_same_budget(recipe: Path) -> None:
    builder = ("--model.builder", "asyncrl.demo.model:build")
    loaded = plan(recipe, "qwen3-0.6b", *builder, machine=GPUS, dry_run=False)
    assert (loaded.config.train.max_tokens_per_microbatch, loaded.config.train.packing_budget) == (None, 8192)


def test_on_a_cpu_the_budget_is_unset_and_nothing_is_refused(recipe: Path) -> None:
    loaded = plan(recipe, "qwen3-32b", "--dry-run")
    assert (loaded.config.train.max_tokens_per_microbatch, loaded.config.train.packing_budget) == (None, 8192)
    assert "# memory in GB for each rank" in dry_run_report(loaded)


def test_config_and_tokenizer_are_enough_for_a_whole_dry_run(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shape = json.loads((MODELS / "qwen3-8b" / "config.json").read_text())
    write_policy(recipe.parent / "policy", vocab_size=64, context_length=40960, config=shape)
    argv = ["@", recipe.name, "--model.path", "policy", "--train.tensor-parallel", "4", "--dry-run", "--as", "8xH100"]
    with pytest.raises(SystemExit) as ended:
        load_config(argv, dry_check=check_start)
    assert ended.value.code == 0
    assert "# planned for 8xH100" in capsys.readouterr().out
    assert not any((recipe.parent / "policy").glob("*.safetensors"))
