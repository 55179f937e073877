"""The loops of entrypoints/, over parts that only note what is asked of them: what happens at which step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from asyncrl import components
from asyncrl.components import RolloutComponents
from asyncrl.errors import ConfigError
from asyncrl.run import warm_up
from tests.loops import load_loop
from tests.run.jobs import Engines, Executor, Trainer, a_job

pytestmark = pytest.mark.anyio
LOOPS = ["train", "train_async", "own_loop"]
EVALUATION = {"data": {"source": "x.jsonl"}}


class Calls(list[str]):
    """What was asked of the parts; asks for a graceful stop once `stop_after` was among it."""

    def __init__(self, stop: Any, stop_after: str) -> None:
        super().__init__()
        self._stop, self._stop_after = stop, stop_after

    def append(self, call: str) -> None:
        super().append(call.removesuffix(" trainer").removesuffix(" BATCH"))
        if self[-1] == self._stop_after:
            self._stop.request()


async def run(
    entrypoint: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    colocated: bool = False,
    per_epoch: int | None = None,
    stop_after: str = "",
    keep_startup: bool = False,
    resumed_at: int | None = None,
    **config: Any,
) -> list[str]:
    """Runs the loop; returns what it asked for after start-up (or since its beginning), in order."""
    module = load_loop(entrypoint)
    monkeypatch.setattr(module, "only_the_best", lambda batch: batch, raising=False)
    async with anyio.create_task_group() as tasks:
        job = a_job(tasks, colocated=colocated, **config)
        calls = Calls(job.stop, stop_after)

        async def create_rollout_components(job: Any, **how: Any) -> Any:
            return RolloutComponents(Engines(calls), Executor(calls), per_epoch)  # type: ignore[arg-type]

        async def create_train_group(job: Any, components: Any) -> Any:
            return Trainer(calls, resumed_at=resumed_at)

        monkeypatch.setattr(components, "create_rollout_components", create_rollout_components)
        monkeypatch.setattr(components, "create_train_group", create_train_group)
        job.record.start = lambda *args: keep_startup or calls.clear()
        job.record.step = lambda number, *rest: calls.append(f"step {number}")
        await getattr(module, {"own_loop": "imitate_the_best"}.get(entrypoint, "train"))(job)
        tasks.cancel_scope.cancel()
    return list(calls)


def steps(calls: list[str], name: str) -> list[int]:
    return [int(call.split()[1]) for call in calls if call.split()[0] == name]


@pytest.mark.parametrize("entrypoint", LOOPS)
async def test_the_number_of_steps_is_the_one_asked_for(entrypoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for train, per_epoch, expected in [
        ({"num_steps": 0}, None, []),
        ({"num_steps": 2}, None, [0, 1]),
        ({"num_steps": None, "num_epochs": 2}, 2, [0, 1, 2, 3]),
    ]:
        calls = await run(entrypoint, monkeypatch, per_epoch=per_epoch, train=train)
        assert steps(calls, "executor.get") == steps(calls, "executor.commit") == expected
        assert steps(calls, "trainer.update_weights") == expected
        assert steps(calls, "step") == [step + 1 for step in expected]


@pytest.mark.parametrize("entrypoint", LOOPS)
async def test_a_graceful_stop_finishes_the_step(entrypoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = await run(entrypoint, monkeypatch, stop_after="executor.get 1")
    assert steps(calls, "trainer.update_weights") == [0, 1]


@pytest.mark.parametrize("stop_after", ["executor.commit 0", "trainer.update_weights 0", "step 1"])
@pytest.mark.parametrize("entrypoint", LOOPS)
async def test_a_graceful_stop_that_comes_when_a_step_is_trained_begins_no_other_and_leaves_that_one_complete(
    entrypoint: str, monkeypatch: pytest.MonkeyPatch, stop_after: str
) -> None:
    calls = await run(entrypoint, monkeypatch, stop_after=stop_after, eval=EVALUATION, checkpoint={"every": 100})
    assert steps(calls, "executor.get") == [0]
    save = ["executor.save", "trainer.save_checkpoint 0 {} wait"]
    in_turn, late = (save, []) if stop_after == "executor.commit 0" else ([], save)
    rest = ["engines.prepare_eval", "executor.eval 1", "trainer.export_hf DIR"]
    after = calls[calls.index("executor.commit 0") + 1 :]
    assert after == [*in_turn, "trainer.update_weights 0", "step 1", *late, *rest]


async def test_what_a_loop_of_ones_own_trains_with_cross_entropy_counts_as_its_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else nothing would be saved when a signal stops it."""
    calls = await run("own_loop", monkeypatch, train={"num_steps": 3})
    assert steps(calls, "trainer.train_sft") == [0, 1, 2]


@pytest.mark.parametrize("entrypoint", ["train", "own_loop"])
async def test_engines_leave_their_gpus_before_the_trainer_comes_back(
    entrypoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = await run(entrypoint, monkeypatch, colocated=True, train={"num_steps": 1}, run={"export": False})
    generated = ["engines.prepare_rollout 0", "executor.get 0"]
    trainers_turn = ["executor.engines_paused", "engines.offload", "trainer.onload"]
    assert calls[:5] == [*generated, *trainers_turn] and calls[5].startswith("trainer.train")
    engines_turn = ["trainer.offload keep_weights", "engines.onload_weights", "trainer.update_weights 0"]
    engines_turn += ["trainer.offload", "engines.onload_kv", "executor.engines_resumed"]
    assert calls[6:] == ["executor.commit 0", *engines_turn, "step 1"]


@pytest.mark.parametrize(
    ("evaluation", "expected"),
    [
        (EVALUATION | {"every": 2}, [0, 2, 4]),
        (EVALUATION | {"every": 2, "at_start": False}, [2, 4]),
        (EVALUATION | {"at_start": False, "at_end": False}, []),
        (EVALUATION, [0, 4]),
        ({"every": 1}, []),
    ],
)
@pytest.mark.parametrize("entrypoint", LOOPS)
async def test_the_policy_is_evaluated_when_it_is_due_and_never_without_prompts(
    entrypoint: str, monkeypatch: pytest.MonkeyPatch, evaluation: dict[str, Any], expected: list[int]
) -> None:
    calls = await run(entrypoint, monkeypatch, eval=evaluation, train={"num_steps": 4})
    assert steps(calls, "executor.eval") == expected


async def test_generation_runs_ahead_from_the_first_step_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = await run("train_async", monkeypatch, train={"num_steps": 2}, eval=EVALUATION)
    ahead = "executor.generate_ahead 0 2"
    assert calls[:4] == ["engines.prepare_eval", "executor.eval 0", ahead, "engines.prepare_rollout 0"]
    assert [call for call in calls if "generate_ahead" in call] == [ahead]


@pytest.mark.parametrize(("interval", "num_steps", "expected"), [(1, 3, [0, 1, 2]), (2, 5, [1, 3, 4]), (9, 2, [1])])
async def test_weights_are_published_at_the_interval_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, interval: int, num_steps: int, expected: list[int]
) -> None:
    train = {"num_steps": num_steps, "update_weights_interval": interval}
    calls = await run("train_async", monkeypatch, train=train)
    assert steps(calls, "trainer.update_weights") == expected
    assert steps(calls, "executor.commit") == list(range(num_steps))


async def test_what_a_graceful_stop_leaves_is_published_before_it_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = await run(
        "train_async",
        monkeypatch,
        stop_after="executor.get 2",
        train={"num_steps": 9, "update_weights_interval": 4},
        eval=EVALUATION | {"at_start": False},
        checkpoint={"every": 100},
    )
    saved = ["executor.commit 2", "executor.save", "trainer.save_checkpoint 2 {} wait", "step 3"]
    evaluated = ["engines.prepare_eval", "executor.eval 3"]
    assert calls[-8:-1] == [*saved, "trainer.update_weights 2", *evaluated]


async def test_engines_on_the_trainers_gpus_cannot_generate_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BaseExceptionGroup) as raised:
        await run("train_async", monkeypatch, colocated=True)
    assert raised.group_contains(ConfigError, match=r"engine\.gpus: .* run entrypoints/train\.py")


@pytest.mark.parametrize("entrypoint", LOOPS)
async def test_the_executor_resumes_before_weights_are_published_and_is_saved_before_the_trainer_leaves_its_gpus(
    entrypoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    how: dict[str, Any] = {"train": {"num_steps": 6}, "checkpoint": {"every": 1}, "run": {"export": False}}
    calls = await run(entrypoint, monkeypatch, resumed_at=4, keep_startup=True, **how)
    begun = calls.index("engines.prepare_rollout 4")
    expected = ["trainer.init", "executor.restore {} 4", "engines.wait_ready", "trainer.update_weights"]
    assert [call for call in calls[:begun] if "generate_ahead" not in call] == expected
    stages = ("executor.commit", "trainer.save_checkpoint", "trainer.update_weights")
    around = [call for call in calls[begun:] if call.startswith(stages)]
    assert around == [
        *("executor.commit 4", "trainer.save_checkpoint 4 {}", "trainer.update_weights 4"),
        *("executor.commit 5", "trainer.save_checkpoint 5 {} wait", "trainer.update_weights 5"),
    ]


@pytest.mark.parametrize("entrypoint", LOOPS)
async def test_a_policy_is_warmed_up_before_its_weights_are_published(
    entrypoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_up, "_load", lambda job, progress: SimpleNamespace(next_batch=lambda step: f"WARM-{step}"))
    how: dict[str, Any] = {"train": {"num_steps": 0}, "warmup": {"steps": 1, "lr": 1.0}, "run": {"export": False}}
    calls = await run(entrypoint, monkeypatch, keep_startup=True, **how)
    warmed_up = ["trainer.train_sft WARM-0 1.0", "trainer.reset_optimizer"]
    assert calls == ["trainer.init", *warmed_up, "engines.wait_ready", "trainer.update_weights"]
