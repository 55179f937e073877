"""The loops of entrypoints/, over parts that only note what is asked of them: what happens at which step."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from asyncrl.components import RolloutComponents
from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.exit_protocol import StopRequest
from tests.loops import load_loop

pytestmark = pytest.mark.anyio
LOOPS = ["train", "train_async", "own_loop"]


class Noted:
    """Notes each call by name; `stop_after` asks for a graceful stop once that one came."""

    def __init__(self, calls: list[str], stop: StopRequest, stop_after: str = "") -> None:
        self.calls, self.stop, self.stop_after = calls, stop, stop_after
        self.last_rollout = None

    def __getattr__(self, name: str) -> Any:
        def note(*args: Any, **how: Any) -> None:
            numbers = [str(value) for value in args if isinstance(value, int)]
            self.calls.append(" ".join([name, *numbers, *(key for key, value in how.items() if value)]))
            if self.calls[-1] == self.stop_after:
                self.stop.request()

        async def call(*args: Any, **how: Any) -> Any:
            note(*args, **how)
            return 0

        async def never() -> None:
            await anyio.sleep_forever()

        return {"generate_ahead": note, "engines_paused": note, "wait_publication_needed": never}.get(name, call)


async def run(
    entrypoint: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    colocated: bool = False,
    per_epoch: int | None = None,
    stop_after: str = "",
    keep_startup: bool = False,
    **config: Any,
) -> list[str]:
    """Runs the loop; returns what it asked for after start-up (or since its beginning), in order."""
    module = load_loop(entrypoint)
    calls: list[str] = []
    stop = StopRequest()
    parts = Noted(calls, stop, stop_after)
    record = SimpleNamespace(
        phase=lambda name: nullcontext(), start=lambda *args: keep_startup or calls.clear(), steps=0
    )

    def step(number: int, *rest: Any) -> None:
        record.steps = number
        if stop_after == f"step {number}":
            stop.request()

    record.step = step

    async def create_rollout_components(job: Any) -> Any:
        return RolloutComponents(parts, parts, per_epoch)  # type: ignore[arg-type]

    async def create_train_group(job: Any, components: Any) -> Any:
        return parts

    for name in ("resume", "warm_up", "checkpoint", "last_checkpoint", "publish", "evaluate", "export"):
        monkeypatch.setattr(module, name, getattr(parts, name), raising=False)
    monkeypatch.setattr(module, "create_rollout_components", create_rollout_components)
    monkeypatch.setattr(module, "create_train_group", create_train_group)
    monkeypatch.setattr(module, "only_the_best", lambda batch: batch, raising=False)
    job = SimpleNamespace(
        config=Config.model_validate(config),
        record=record,
        stop=stop,
        layout=SimpleNamespace(colocated=colocated),
    )
    await getattr(module, {"own_loop": "imitate_the_best"}.get(entrypoint, "train"))(job)
    return calls


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
        assert steps(calls, "get") == steps(calls, "commit") == steps(calls, "publish") == expected


@pytest.mark.parametrize("entrypoint", LOOPS)
async def test_a_graceful_stop_finishes_the_step(entrypoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = await run(entrypoint, monkeypatch, stop_after="get 1")
    assert steps(calls, "publish") == [0, 1]


@pytest.mark.parametrize("stop_after", ["checkpoint 0", "publish 0", "step 1"])
@pytest.mark.parametrize("entrypoint", LOOPS)
async def test_a_graceful_stop_that_comes_when_a_step_is_trained_begins_no_other_and_leaves_that_one_complete(
    entrypoint: str, monkeypatch: pytest.MonkeyPatch, stop_after: str
) -> None:
    calls = await run(entrypoint, monkeypatch, stop_after=stop_after, eval={"data": {"source": "x.jsonl"}})
    assert steps(calls, "get") == [0]
    after = calls[calls.index("commit 0") + 1 :]
    rest = [] if entrypoint == "own_loop" else ["evaluate 1", "export 1"]
    assert after == ["checkpoint 0", "publish 0", "last_checkpoint", *rest]


async def test_what_a_loop_of_ones_own_trains_with_cross_entropy_counts_as_its_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else nothing would be saved when a signal stops it."""
    calls = await run("own_loop", monkeypatch, train={"num_steps": 3})
    assert steps(calls, "train_sft") == [0, 1, 2]


@pytest.mark.parametrize("entrypoint", ["train", "own_loop"])
async def test_engines_leave_their_gpus_before_the_trainer_comes_back(
    entrypoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = await run(entrypoint, monkeypatch, colocated=True, train={"num_steps": 1})
    assert calls[:5] == ["prepare_rollout 0", "get 0", "engines_paused", "offload", "onload"] and "train" in calls[5]
    rest = [call for call in calls[6:] if not call.startswith("checkpoint")]
    assert rest[:2] == ["commit 0", "publish 0"]


@pytest.mark.parametrize(
    ("evaluation", "expected"),
    [
        ({"data": {"source": "x.jsonl"}, "every": 2}, [0, 2, 4]),
        ({"data": {"source": "x.jsonl"}, "every": 2, "at_start": False}, [2, 4]),
        ({"data": {"source": "x.jsonl"}, "at_start": False, "at_end": False}, []),
        ({"data": {"source": "x.jsonl"}}, [0, 4]),
        ({"every": 1}, []),
    ],
)
@pytest.mark.parametrize("entrypoint", ["train", "train_async"])
async def test_the_policy_is_evaluated_when_it_is_due_and_never_without_prompts(
    entrypoint: str, monkeypatch: pytest.MonkeyPatch, evaluation: dict[str, Any], expected: list[int]
) -> None:
    calls = await run(entrypoint, monkeypatch, eval=evaluation, train={"num_steps": 4})
    assert steps(calls, "evaluate") == expected


async def test_generation_runs_ahead_from_the_first_step_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = await run("train_async", monkeypatch, train={"num_steps": 2}, eval={"data": {"source": "x.jsonl"}})
    assert calls[:3] == ["evaluate 0", "generate_ahead 0 2", "prepare_rollout 0"]
    assert [call for call in calls if call.startswith("generate_ahead")] == ["generate_ahead 0 2"]


@pytest.mark.parametrize(("interval", "num_steps", "expected"), [(1, 3, [0, 1, 2]), (2, 5, [1, 3, 4]), (9, 2, [1])])
async def test_weights_are_published_at_the_interval_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, interval: int, num_steps: int, expected: list[int]
) -> None:
    train = {"num_steps": num_steps, "update_weights_interval": interval}
    calls = await run("train_async", monkeypatch, train=train)
    assert steps(calls, "publish") == expected and steps(calls, "commit") == list(range(num_steps))


async def test_what_a_graceful_stop_leaves_is_published_before_it_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = await run(
        "train_async",
        monkeypatch,
        stop_after="get 2",
        train={"num_steps": 9, "update_weights_interval": 4},
        eval={"data": {"source": "x.jsonl"}, "at_start": False},
    )
    assert calls[-6:-1] == ["commit 2", "checkpoint 2 last", "last_checkpoint", "publish 2", "evaluate 3"]


async def test_engines_on_the_trainers_gpus_cannot_generate_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"engine\.gpus: .* run entrypoints/train\.py"):
        await run("train_async", monkeypatch, colocated=True)


@pytest.mark.parametrize("entrypoint", LOOPS)
async def test_the_executor_resumes_before_weights_are_published_and_is_saved_before_the_trainer_leaves_its_gpus(
    entrypoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = await run(entrypoint, monkeypatch, train={"num_steps": 2}, keep_startup=True)
    startup = calls[: calls.index("prepare_rollout 0")]
    assert [call for call in startup if call in ("init", "resume 0", "warm_up", "publish")] == [
        *("init", "resume 0", "warm_up", "publish"),
    ]
    around = [call for call in calls if call.split()[0] in ("commit", "checkpoint", "publish")]
    assert around[1:] == [*("commit 0", "checkpoint 0", "publish 0"), *("commit 1", "checkpoint 1 last", "publish 1")]
