"""Help and dry run as a user meets them: fast, complete, starting nothing."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from asyncrl.config.reading.loading import load_config
from asyncrl.config.reading.reference import reference
from asyncrl.config.reading.report import dry_run_report
from asyncrl.config.reading.schema import fields

DOCS = Path(__file__).parents[2] / "docs" / "configuration.md"
LOAD = "import sys; from asyncrl.config.reading.loading import load_config; load_config(sys.argv[1:])"


def run(*argv: str, code: str = LOAD, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *argv],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environ,
    )


def children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_help_explains_every_field_in_under_a_second():
    seconds = []
    for _ in range(3):
        before = children_cpu_s()
        done = run("--help")
        # CPU time: it is what help costs, and on a busy machine it stays so.
        seconds.append(children_cpu_s() - before)
    assert done.returncode == 0
    for spec in fields().values():
        assert spec.help, f"{spec.key} has no docstring"
        if spec.kind not in ("section", "sections"):
            assert re.search(rf"^  {re.escape(spec.option)} ", done.stdout, re.MULTILINE), spec.option
    assert min(seconds) < 1.0
    assert not re.search(r"[ \t]$", done.stdout, re.MULTILINE)


def test_help_names_the_program_that_was_asked(recipe):
    Path("my_loop.py").write_text(LOAD)
    done = subprocess.run([sys.executable, "my_loop.py", "--help"], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("usage: my_loop.py [@ RECIPE.toml ...]")


@pytest.mark.parametrize("argv", [["--help"], ["--dry-run"], ["--engine.server-args.chunked-prefill-size", "1"]])
def test_neither_torch_nor_the_engine_is_imported(recipe, argv):
    code = (
        "import sys\nfrom asyncrl.config.reading.loading import load_config\n"
        "try: load_config(sys.argv[1:])\nexcept SystemExit: pass\n"
        "print('imported', [m for m in ('torch', 'sglang', 'transformers', 'megatron', 'numpy') if m in sys.modules])"
    )
    done = run("@", "recipe.toml", *argv, code=code)
    assert done.stdout.splitlines()[-1] == "imported []", done.stderr


def test_dry_run_prints_a_valid_recipe_with_origins_and_the_layout_and_starts_nothing(recipe):
    done = run("@", "recipe.toml", "--train.lr", "0.5", "--engine.num-engines", "2", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert tomllib.loads(done.stdout)["train"]["lr"] == 0.5
    assert re.search(r"^lr = 0\.5 +# --train\.lr$", done.stdout, re.MULTILINE)
    assert re.search(r"^path = \"model\" +# recipe\.toml$", done.stdout, re.MULTILINE)
    assert re.search(r"^seed = 1234 +# default$", done.stdout, re.MULTILINE)
    for process in ("rank 0", "host", "router", "engine-0", "engine-1", "rewards"):
        assert re.search(rf"^#   {process} ", done.stdout, re.MULTILINE), process
    assert not Path("run").exists()
    Path("again.toml").write_text(done.stdout)
    again = run("@", "again.toml", "--dry-run")
    assert tomllib.loads(again.stdout) == tomllib.loads(done.stdout)


def test_only_rank_0_prints(recipe):
    other = run("@", "recipe.toml", "--dry-run", RANK="1", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    assert (other.returncode, other.stdout) == (0, "")
    first = run("@", "recipe.toml", "--dry-run", RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    assert re.search(r"^#   rank 1 ", first.stdout, re.MULTILINE)


def test_dry_run_refuses_what_a_run_would_refuse(recipe):
    done = run("@", "recipe.toml", "--dry-run", "--rollout.temperature", "0")
    assert done.returncode != 0
    assert "rollout.temperature: 0 (greedy) cannot train" in done.stderr


def test_secrets_are_blanked_out_in_the_report(load):
    loaded = load("--data.args.hf-token", "s3cret")
    assert loaded.config.data.args["hf_token"] == "s3cret"
    assert "s3cret" not in dry_run_report(loaded)


def test_a_configuration_that_is_returned_can_be_run(recipe, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    loaded = load_config(["@", "recipe.toml"])
    assert len(loaded.layout.engines) == 1


def test_the_reference_in_docs_is_that_of_the_schema():
    assert DOCS.read_text() == reference(), "run python -m asyncrl.config.reading.reference > docs/configuration.md"
