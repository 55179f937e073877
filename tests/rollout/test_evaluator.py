"""One point of the evaluation curve, or a reason why there is none: what is asked for, of whom, and how it may fail."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from asyncrl.data.fleet import EvalFleetInfo
from asyncrl.errors import ConfigError
from asyncrl.host import EngineHost
from asyncrl.observability.events import EventLog
from asyncrl.rollout.connection import Connection
from asyncrl.rollout.evaluation import EvalReport
from asyncrl.rollout.executor import RolloutExecutor
from asyncrl.rollout.scheduling.group import GroupState
from tests.rollout.conftest import StartExecutor
from tests.rollout.fleet import eventually
from tests.scripted.answers import Action, scripted_engine


async def test_evaluation_is_greedy_over_all_held_out_prompts(start_executor: StartExecutor, prompts: Path) -> None:
    def script(request: dict[str, Any], number: int) -> Action:
        return Action(text="yes" if number % 4 else "no")

    evaluation = {"data": {"source": str(prompts)}, "max_new_tokens": 5}
    async with scripted_engine(script) as engine, start_executor(engine, eval=evaluation) as executor:
        report = await executor.eval(3)
        assert report.accuracy == report.mean_reward == 0.75 and report.skipped is None
        assert report.num_prompts == report.num_samples == 40
        assert {request["sampling_params"]["temperature"] for request in engine.requests} == {0.0}
        assert {request["sampling_params"]["max_new_tokens"] for request in engine.requests} == {5}
        assert executor.statistics().groups[GroupState.ADMITTED] == 0, "held-out groups are not in the ledger"
        assert report.as_dict()["eval/accuracy"] == 0.75


async def test_an_evaluation_without_training_reads_no_prompts_of_training(
    start_executor: StartExecutor, prompts: Path
) -> None:
    sections = {"data": {"source": ""}, "train": {"num_steps": 0}, "eval": {"data": {"source": str(prompts)}}}
    async with scripted_engine() as engine, start_executor(engine, **sections) as executor:
        assert (await executor.eval(0)).skipped is None


async def test_an_evaluation_that_does_not_end_is_a_skipped_point(start_executor: StartExecutor, prompts: Path) -> None:
    evaluation = {"data": {"source": str(prompts)}, "timeout_s": 0.3}
    async with scripted_engine() as engine, start_executor(engine, eval=evaluation) as executor:
        engine.script = lambda request, number: Action(fault="hang" if number == 5 else None)
        report = await executor.eval(0)
        assert report.accuracy is None and report.as_dict() == {}
        assert re.search(r"no evaluation .* after 0.3 s; \d+ prompts done", str(report.skipped))
        await engine.until(lambda e: e.in_flight == 0)


async def test_failed_samples_of_an_evaluation_are_counted_and_too_many_skip_the_point(
    start_executor: StartExecutor, prompts: Path, events: EventLog
) -> None:
    async with scripted_engine() as engine, start_executor(engine, eval={"data": {"source": str(prompts)}}) as executor:
        engine.script = lambda request, number: Action(fault="status", status=400)
        assert "40 of 40 samples failed; the first: generation refused" in str((await executor.eval(1)).skipped)
        engine.script = lambda request, number: Action(fault="refuse" if number % 4 == 0 else None)
        report = await executor.eval(2)
        assert report.accuracy == 1.0 and report.failed_samples == 10
    assert [line["skipped"] is None for line in events.recent if line["kind"] == "evaluated"] == [False, True]
    async with scripted_engine() as engine, start_executor(engine) as executor:
        assert "there are no held-out prompts" in str((await executor.eval(0)).skipped)
        assert events.recent[-1]["kind"] == "evaluated", "each point is told"


async def test_the_end_of_the_job_in_an_evaluation_is_a_skipped_point(
    start_executor: StartExecutor, prompts: Path, events: EventLog
) -> None:
    reports: list[EvalReport] = []

    async def evaluate(executor: RolloutExecutor) -> None:
        reports.append(await executor.eval(1))

    async with (
        scripted_engine(lambda request, number: Action(fault="hang" if number > 5 else None)) as engine,
        start_executor(engine, eval={"data": {"source": str(prompts)}}) as executor,
    ):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(evaluate, executor)
            await engine.until(lambda e: e.in_flight == 34)
            await executor.dispose()
        assert re.search("the connection was closed when .*; 6 prompts done", str(reports[0].skipped))
        assert executor.report_eval_skip(2, "no engine").skipped == "no engine"
        assert "the connection is not open" in str((await executor.eval(3)).skipped)
        await engine.until(lambda e: e.in_flight == 0)
    assert [line["skipped"] for line in events.recent if line["kind"] == "evaluated"][1] == "no engine"


async def test_an_evaluation_may_be_repeated_at_the_same_step(start_executor: StartExecutor, prompts: Path) -> None:
    async with scripted_engine() as engine, start_executor(engine, eval={"data": {"source": str(prompts)}}) as executor:
        for _ in range(3):
            assert (await executor.eval(4)).accuracy == 1.0
        rids = [request["rid"] for request in engine.requests]
    assert len(rids) == 120 and not [rid for rid in rids if sum(other.startswith(rid) for other in rids) > 1]


async def test_an_evaluation_goes_to_the_engines_that_only_evaluate_while_there_are_some(
    start_executor: StartExecutor, prompts: Path
) -> None:
    evaluation = {"data": {"source": str(prompts)}}
    async with (
        scripted_engine(made_by("0.2")) as trained,
        scripted_engine(made_by("0.1")) as pinned,
        start_executor(trained, eval=evaluation) as executor,
    ):
        executor.set_eval_fleet(EvalFleetInfo(pinned.url, "0.1", (pinned.url,)))
        assert (await executor.eval(1)).accuracy == 1.0
        assert (len(trained.requests), len(pinned.requests)) == (0, 40)
        executor.set_eval_fleet(EvalFleetInfo(pinned.url, "0.3", (pinned.url,)))
        assert (await executor.eval(2)).skipped == "samples were made by weights 0.1 instead of 0.3"
        executor.set_eval_fleet(None)
        assert (await executor.eval(3)).accuracy == 1.0
        assert (len(trained.requests), len(pinned.requests)) == (40, 80)


async def test_the_connection_to_a_fleet_that_was_replaced_is_closed_once_nothing_runs_over_it(
    start_executor: StartExecutor, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Connection] = []
    aclose = Connection.aclose

    async def noted(connection: Connection) -> None:
        await aclose(connection)
        closed.append(connection)

    async with (
        scripted_engine() as trained,
        scripted_engine(lambda request, number: Action(fault="hang")) as first,
        scripted_engine() as second,
        start_executor(trained, eval={"data": {"source": str(prompts)}}) as executor,
    ):
        monkeypatch.setattr(Connection, "aclose", noted)
        executor.set_eval_fleet(EvalFleetInfo(first.url, "0.1", (first.url,)))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(executor.eval, 1)
            await first.until(lambda e: e.in_flight == 40)
            executor.set_eval_fleet(EvalFleetInfo(second.url, "0.1", (second.url,)))
            await executor.eval(2)
            assert closed == [] and first.in_flight == 40, "an evaluation is still under way there"
            first.released.set()
        await eventually(lambda: len(closed) == 1)
        executor.set_eval_fleet(None)
        await eventually(lambda: len(closed) == 2)
        executor.set_eval_fleet(EvalFleetInfo(second.url, "0.1", (second.url,)))
        assert (await executor.eval(3)).skipped is None, "it may come back"
    assert len(closed) == 4 and len(set(closed)) == 4, "each once, that to the training engines too"


def made_by(version: str) -> Callable[[dict[str, Any], int], Action]:
    return lambda request, number: Action((5, 6, 7, 2), text="yes", versions=((version, 0, 4),))


async def test_a_directory_is_evaluated_on_engines_that_load_it_first(
    start_executor: StartExecutor, prompts: Path, tmp_path: Path
) -> None:
    asked: list[Path | None] = []
    async with scripted_engine(made_by("0.2")) as trained, scripted_engine(made_by("mine")) as pinned:

        async def pin(hf_dir: Path | None) -> EvalFleetInfo:
            asked.append(hf_dir)
            return EvalFleetInfo(pinned.url, "mine" if hf_dir else "0.2", (pinned.url,))

        async with start_executor(trained, eval={"data": {"source": str(prompts)}}, pin_eval_fleet=pin) as executor:
            report = await executor.eval(1, hf_dir=tmp_path / "mine")
            assert (report.accuracy, report.versions) == (1.0, ("mine",))
            assert (len(trained.requests), len(pinned.requests), asked) == (0, 40, [tmp_path / "mine"])
        async with start_executor(trained, eval={"data": {"source": str(prompts)}}) as executor:
            assert "no engines that only evaluate" in str((await executor.eval(1, hf_dir=tmp_path)).skipped)


async def test_a_point_names_every_version_that_made_its_samples(start_executor: StartExecutor, prompts: Path) -> None:
    def two(request: dict[str, Any], number: int) -> Action:
        return Action((5, 6, 7, 2), text="yes", versions=(("0.9", 0, 2), ("0.10", 2, 4)))

    async with (
        scripted_engine(two) as engine,
        start_executor(engine, eval={"data": {"source": str(prompts)}}) as executor,
    ):
        assert (await executor.eval(9)).versions == ("0.9", "0.10")


EXTERNAL = {
    "scores": ({"accuracy": 0.25, "pass_at_4": 0.5}, None),
    "plain": (0.75, None),
    "sync": (0.75, None),
    "raises": (None, "ValueError: no such task"),
    "wrong": (None, "a dict of numbers with `accuracy` is wanted, and it returned {'score': 1}"),
    "hangs": (None, "no evaluation .* after 3 s"),
    "dies": (None, r"own_evaluations:dies ended its process: exit code 7: my last words"),
}


@pytest.mark.parametrize("name", EXTERNAL)
async def test_a_function_of_the_users_own_evaluates_the_checkpoint_as_a_model_directory(
    start_executor: StartExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("the first")
    (checkpoint := tmp_path / "published").mkdir()
    (checkpoint / "model.safetensors").write_text("the trained")
    (tmp_path / "own_evaluations.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)

    async def pin(hf_dir: Path | None) -> EvalFleetInfo:
        return EvalFleetInfo("", "0.4", (), checkpoint)

    settings = {"function": f"own_evaluations:{name}", "function_args": {"k": 4}}
    settings["timeout_s"] = 3 if name == "hangs" else 60
    async with (
        EngineHost.start(tmp_path / "logs") as host,
        scripted_engine() as engine,
        start_executor(engine, host=host, eval=settings, pin_eval_fleet=pin) as executor,
    ):
        report = await executor.eval(4)
    expected, skipped = EXTERNAL[name]
    if skipped is not None:
        assert report.accuracy is None and re.search(skipped, str(report.skipped))
        return
    numbers = expected if isinstance(expected, dict) else {"accuracy": expected}
    assert {key: value for key, value in report.as_dict().items() if key != "eval/seconds"} == {
        **{f"eval/{key}": value for key, value in numbers.items()},
        **{f"eval/{key}": 0 for key in ("num_prompts", "num_samples", "failed_samples")},
    }
    assert report.versions == ("0.4",) and not engine.requests


OWN = """
import os
import time

def sync(hf_dir, k):
    assert sorted(p.name for p in hf_dir.iterdir()) == ["config.json", "model.safetensors", "own_evaluations.py",
        "tokenizer.json", "train.jsonl"], list(hf_dir.iterdir())
    assert (hf_dir / "model.safetensors").read_text() == "the trained" and k == 4
    return 0.75

async def plain(hf_dir, k):
    return sync(hf_dir, k)

async def scores(hf_dir, k):
    return {"accuracy": 0.25, "pass_at_4": 0.5}

def raises(hf_dir, k):
    raise ValueError("no such task")

async def wrong(hf_dir, k):
    return {"score": 1}

def hangs(hf_dir, k):
    time.sleep(600)

def dies(hf_dir, k):
    print("my last words", flush=True)
    os._exit(7)
"""


async def test_an_evaluation_that_is_cancelled_leaves_no_process(
    start_executor: StartExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_evaluations.py").write_text(OWN)
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.syspath_prepend(tmp_path)

    async def pin(hf_dir: Path | None) -> EvalFleetInfo:
        return EvalFleetInfo("", "0.4", (), tmp_path)

    def running() -> int:
        mine = {child.pid for child in psutil.Process().children(recursive=True)}
        lines = (p.info["cmdline"] or () for p in psutil.process_iter(["cmdline"]) if p.pid in mine)
        return sum("asyncrl.rollout.evaluation_process" in line for line in lines)

    settings = {"function": "own_evaluations:hangs", "function_args": {"k": 4}}
    async with (
        EngineHost.start(tmp_path) as host,
        scripted_engine() as engine,
        start_executor(engine, host=host, eval=settings, pin_eval_fleet=pin) as executor,
    ):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(executor.eval, 4)
            await eventually(lambda: running() > 0)
            tasks.cancel_scope.cancel()
        await eventually(lambda: running() == 0)  # one whose start was not answered yet is killed without a wait


async def test_a_function_that_does_not_take_its_arguments_is_refused_before_anything_runs(
    start_executor: StartExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_evaluations.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    settings = {"function": "own_evaluations:sync", "function_args": {"n": 1}}
    async with scripted_engine() as engine:
        with pytest.raises(BaseExceptionGroup) as raised:
            async with start_executor(engine, eval=settings):
                pass
    assert raised.group_contains(ConfigError, match=r"eval\.function: .*\(hf_dir, \*\*eval\.function_args\)")
