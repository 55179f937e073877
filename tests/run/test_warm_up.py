"""The warm-up, over a trainer that only notes what is asked of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.run import warm_up
from tests.run.jobs import Trainer, a_job

pytestmark = pytest.mark.anyio


async def test_what_a_warm_up_trains_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    job = a_job(warmup={"steps": 2, "lr": 1.0})
    monkeypatch.setattr(
        warm_up, "_load", lambda job, progress: SimpleNamespace(next_batch=lambda step: f"BATCH-{step}")
    )
    trainer: Any = Trainer(calls)
    await warm_up.warm_up(job, trainer)
    assert calls == ["trainer.train_sft BATCH-0 1.0", "trainer.train_sft BATCH-1 1.0", "trainer.reset_optimizer"]
    assert trainer.step == 0 and job.record.notes == ["warm-up: 2 supervised steps, loss 0.500"]


@pytest.mark.parametrize("how", [{"resumed_at": 3}, {"rollout_only": True}])
async def test_nothing_is_warmed_up_after_a_resume_or_without_a_trainer(how: dict[str, Any]) -> None:
    calls: list[str] = []
    job = a_job(warmup={"steps": 3}, debug={"rollout_only": how.get("rollout_only", False)})
    trainer: Any = Trainer(calls, resumed_at=how.get("resumed_at"))
    await warm_up.warm_up(job, trainer)
    assert calls == []
