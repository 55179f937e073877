"""Training on saved batches without engines: what the loop gets, and what is told of it."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from asyncrl.data.batch import RolloutBatch
from asyncrl.data.saved_batch import save_batch
from asyncrl.debugging.replay import COMPARISON, NoEngines, Replay, SavedRollouts
from asyncrl.errors import DataError, EngineError, RolloutError
from asyncrl.exit_protocol import StopRequest
from asyncrl.observability.events import EventLog
from asyncrl.rollout.metrics import RolloutMetrics
from tests.training.worlds import make_batch

pytestmark = pytest.mark.anyio
NUMBERS: dict[str, Any] = {f.name: "" if f.name == "failure" else 1 for f in fields(RolloutMetrics)}
METRICS = RolloutMetrics(**NUMBERS | {"rollout_id": 7, "reward_mean": 0.5})


async def test_batches_come_as_they_were_saved_and_the_loop_ends_with_the_last(tmp_path: Path) -> None:
    for rollout_id in (7, 8):
        save_batch(make_batch(rollout_id), tmp_path, {"rollout": asdict(METRICS)})
    stop = StopRequest()
    executor = SavedRollouts(tmp_path, stop)
    assert executor.get_num_rollout_per_epoch() == 9, "as many as the loop counts up to the last of them"
    with pytest.raises(RolloutError, match=r"no batch of rollout 0, but those of 7 to 8; training begins"):
        await executor.get(0)
    assert (await executor.get(7)).group_ids == make_batch().group_ids
    assert executor.last_rollout == METRICS and not stop.requested
    await executor.get(8)
    assert stop.requested


async def test_a_batch_that_a_failure_left_is_trained_too(tmp_path: Path) -> None:
    save_batch(make_batch(3), tmp_path, {"what": "the loss is nan"})
    executor = SavedRollouts(tmp_path, StopRequest())
    await executor.get(3)
    figures = executor.last_rollout
    assert (figures.rollout_id, figures.samples, figures.response_tokens, figures.reward_mean) == (3, 2, 5, 0.5)
    assert figures.as_dict()["rollout/samples"] == 2 and "rollout/engine_queue_max" not in figures.as_dict()


def test_a_directory_without_batches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"debug.load_rollouts: .* holds no saved batch; run with debug.save_rollouts"):
        SavedRollouts(tmp_path, StopRequest())


async def test_an_evaluation_has_no_engines_to_ask() -> None:
    engines = NoEngines()
    for ask in (engines.prepare_eval, lambda: engines.begin_weight_update("0.0")):
        with pytest.raises(EngineError, match="without engines"):
            await ask()


async def test_an_evaluation_on_saved_batches_is_a_skipped_point(tmp_path: Path) -> None:
    save_batch(make_batch(0), tmp_path, {})
    report = await SavedRollouts(tmp_path, StopRequest()).eval(3)
    assert (report.rollout_id, report.skipped) == (3, "debug.train_only runs without engines")


async def test_each_step_is_held_against_the_last_attempt_that_recorded_it(tmp_path: Path) -> None:
    lines = [{"step": s, "train/loss": loss, "train/tokens": 9.0} for s, loss in [(1, 0.1), (2, 9.0), (2, 0.2)]]
    lines.append({"step": 2, "eval/accuracy": 0.5})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "rollouts").mkdir()
    events, notes = EventLog(None), list[str]()
    replay = Replay(
        tmp_path / "rollouts", tolerance=1e-3, report=tmp_path / COMPARISON, events=events, note=notes.append
    )

    async def step(batch: RolloutBatch, loss: float) -> dict[str, float]:
        done: list[str] = []

        async def logprobs() -> Tensor:
            done.append("log-probs")
            return batch.logprobs

        async def train() -> dict[str, float]:
            assert done == ["log-probs"], "of the weights before the step"
            return {"train/loss": loss}

        return await replay.step(batch, logprobs, train)

    assert await step(make_batch(0), 0.1) == {"train/loss": 0.1}
    await step(make_batch(1), 0.3)
    await step(make_batch(2), 0.4)
    replay.conclude()
    told: list[Any] = [json.loads(line) for line in (tmp_path / COMPARISON).read_text().splitlines()]
    assert [(line["step"], line["same"]) for line in told] == [(1, True), (2, False), (3, None)]
    assert told[1]["metrics"] == {"train/loss": {"recorded": 0.2, "replayed": 0.3}}
    assert [e["what"] for e in events.recent] == [notes[1]] and "was 0.2, is 0.3" in notes[1]
    assert notes[-1].startswith("1 of 2 replayed steps differ, the first is step 2")
    assert notes[-1].endswith(f"see {tmp_path / COMPARISON}")
