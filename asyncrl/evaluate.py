"""`asyncrl evaluate MODEL @ recipe.toml`: how good a model on disk is on the held-out prompts of a recipe.

Engines load the model as it is; there is no trainer, and the prompts of training are not read. The point is told, and
stands in the run directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asyncrl.components import Job, run_job, start_run
from asyncrl.errors import ConfigError, RolloutError


async def evaluate(job: Job) -> None:
    """Evaluates `model.path`. Raises RolloutError where that fails, ConfigError where there is nothing to evaluate."""
    config = job.config
    if not config.eval.enabled:
        raise ConfigError("eval.data: there are no held-out prompts; set eval.data.source, or eval.function")
    run = await start_run(job)
    report = await run.executor.eval(0, None if config.eval.function is None else config.model.path)
    if report.skipped is not None:
        raise RolloutError(f"{config.model.path} could not be evaluated: {report.skipped}")
    job.record.evaluated(0, report.accuracy, report.as_dict(), None)
    for name, value in sorted(report.as_dict().items()):
        job.record.note(f"{name} = {value:g}")


def evaluate_model(model: Path, argv: Sequence[str]) -> int:
    """Runs `evaluate` on the model in directory `model`; `argv` holds recipes and settings. Returns the exit code."""
    name = model.absolute().name
    ours = ["--model.path", str(model), "--model.builder", "none", "--debug.rollout_only", "--eval.fleet", "none"]
    ours += ["--train.num_steps", "0", "--data.source", ""]
    there = ("--run.dir", f"runs/evaluate-{name}", "--run.if_exists", "new")
    return run_job(evaluate, [*ours, *there, *argv])
