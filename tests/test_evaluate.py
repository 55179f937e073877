"""`asyncrl evaluate MODEL @ recipe.toml`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl import cli, evaluate
from asyncrl.config.reading.loading import load_config
from asyncrl.errors import ConfigError, RolloutError
from asyncrl.rollout.evaluation import EvalReport, skipped_report
from tests.run.jobs import a_job

pytestmark = pytest.mark.anyio
DATA = {"source": "x.jsonl"}


def test_the_command_starts_a_job_without_a_trainer_on_that_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("held-out.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    Path("export").mkdir()
    Path("export/config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    recipe = "[model]\nbuilder = 'my:model'\n[data]\nsource = 'absent.jsonl'\n[eval.data]\nsource = 'held-out.jsonl'\n"
    Path("my.toml").write_text(recipe + "[eval.fleet]\n")
    asked: list[Any] = []

    def run_job(loop: Any, argv: Sequence[str]) -> int:
        asked.extend([loop, load_config(argv).config])
        return 0

    monkeypatch.setattr(evaluate, "run_job", run_job)
    monkeypatch.setattr(
        sys, "argv", ["asyncrl", "evaluate", "export", "@", "my.toml", "--eval.samples-per-prompt", "4"]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    loop, config = asked
    assert ended.value.code == 0 and loop is evaluate.evaluate
    assert config.debug.rollout_only and config.eval.fleet is None and config.model.builder is None
    assert (config.model.path, config.run.dir, config.run.if_exists) == (
        Path("export"),
        Path("runs/evaluate-export"),
        "new",
    )
    assert config.eval.samples_per_prompt == 4
    assert config.data.source == "" and config.train.num_steps == 0


async def test_the_point_is_told_and_one_that_is_skipped_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = [EvalReport(0, 0.5, 0.75, 2, 2, 0, 0.0, 3.0, 1.0), skipped_report(0, "no engine")]

    async def start_run(job: Any) -> Any:
        async def evaluated(rollout_id: int, hf_dir: Path | None) -> EvalReport:
            assert hf_dir is None
            return reports.pop(0)

        return SimpleNamespace(executor=SimpleNamespace(eval=evaluated))

    monkeypatch.setattr(evaluate, "start_run", start_run)
    job = a_job(eval={"data": DATA})
    await evaluate.evaluate(job)
    assert job.record.points[0][:2] == (0, 0.5) and "eval/mean_reward = 0.75" in job.record.notes
    with pytest.raises(RolloutError, match="could not be evaluated: no engine"):
        await evaluate.evaluate(job)
    with pytest.raises(ConfigError, match=r"eval\.data: there are no held-out prompts"):
        await evaluate.evaluate(a_job())
