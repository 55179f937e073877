"""What a reward function, or the machine, can do to the run: one sample fails at most, and who is at fault is told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from asyncrl.config.rollout import RewardConfig
from asyncrl.rollout.rewards import scorer
from asyncrl.rollout.rewards.registry import resolve_reward
from asyncrl.rollout.rewards.scorer import Scorer
from tests.rollout.reward_functions import may_return
from tests.rollout.test_rewards import MODULE, host, sample_of, scorer_of

__all__ = ["host"]  # a fixture


# threads


@pytest.fixture
async def one_thread(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[anyio.CapacityLimiter]:
    """One thread for rewards, and anyio's own limit, which the rest of the driver shares, is one too."""
    monkeypatch.setattr(scorer, "_SLOTS", 1, raising=False)
    monkeypatch.setattr(scorer, "_MOST_RUNNING", 2, raising=False)
    limiter = anyio.to_thread.current_default_thread_limiter()
    before, limiter.total_tokens = limiter.total_tokens, 1
    yield limiter
    limiter.total_tokens = before


async def test_the_wait_for_a_thread_is_not_held_against_a_sample(
    tmp_path: Path, one_thread: anyio.CapacityLimiter
) -> None:
    rewards: list[float | None] = []
    async with scorer_of("naps", tmp_path, timeout_s=1.5, seconds=0.6) as scorer, anyio.create_task_group() as tasks:

        async def one() -> None:
            rewards.append((await scorer.score(*sample_of())).reward)

        for _ in range(4):  # 2.4 s, one after the other
            tasks.start_soon(one)
    assert rewards == [1.0] * 4


async def test_rewards_need_no_thread_that_the_drivers_file_work_has(
    tmp_path: Path, one_thread: anyio.CapacityLimiter
) -> None:
    async with one_thread, scorer_of("good", tmp_path, timeout_s=2.0) as scorer:
        assert (await scorer.score(*sample_of())).reward == 1.0


@pytest.fixture
def told_to_return() -> Iterator[None]:
    may_return.clear()
    yield
    may_return.set()


async def test_calls_that_hang_in_threads_leave_their_slot_to_others_until_there_are_too_many(
    tmp_path: Path, one_thread: anyio.CapacityLimiter, told_to_return: None
) -> None:
    async with scorer_of("hangs_until_told", tmp_path, timeout_s=0.2) as scorer:
        for _ in range(2):
            assert "longer than 0.2 s" in str((await scorer.score(*sample_of())).failure)
        refused = await scorer.score(*sample_of())
        assert refused.failure is not None and refused.failure.startswith("2 calls of the reward hang: set reward.work")
        may_return.set()
        with anyio.fail_after(10):
            while (await scorer.score(*sample_of())).reward != 1.0:  # noqa: ASYNC110
                await anyio.sleep(0.01)


# what ends no run


@pytest.mark.parametrize(
    ("function", "failure"),
    [
        ("awaits_cancelled", "the reward function awaited something that was cancelled"),
        ("raises_cancelled", "CancelledError:"),
        ("exits", "SystemExit: 3 ("),
        ("exits_async", "SystemExit: 3 ("),
        ("raises_unprintable", "Unprintable: no message, for its __str__ raised RuntimeError ("),
        ("raises_unprintable_async", "Unprintable: no message, for its __str__ raised RuntimeError ("),
    ],
)
async def test_what_a_function_raises_in_the_driver_fails_its_own_sample_only(
    tmp_path: Path, function: str, failure: str
) -> None:
    async with scorer_of(function, tmp_path) as scorer:
        for _ in range(2):
            assert str((await scorer.score(*sample_of())).failure).startswith(failure)


@pytest.mark.parametrize("function", ["endless_async", "awaits_cancelled_while_cancelled"])
async def test_a_cancelled_score_stays_cancelled(tmp_path: Path, function: str) -> None:
    scores: list[Any] = []

    async def one() -> None:
        scores.append(await scorer.score(*sample_of()))

    async with scorer_of(function, tmp_path) as scorer:
        with anyio.move_on_after(0.05) as scope:
            await one()
        assert scope.cancelled_caught
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        with pytest.raises(ExceptionGroup) as error:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(one)
                await anyio.wait_all_tasks_blocked()
                raise OSError("the run ends")
        assert error.group_contains(OSError, match="the run ends") and not scores
    async with scorer_of(function, tmp_path, timeout_s=0.05) as scorer:
        assert (await scorer.score(*sample_of())).failure == "the reward took longer than 0.05 s and was ended"


async def test_an_interrupt_from_the_keyboard_passes(tmp_path: Path) -> None:
    def scorer_for(function: str) -> Scorer:
        config = RewardConfig(function=f"{MODULE}:{function}", workers=0)
        return Scorer(resolve_reward(config.function, {}), config, host=None, log_dir=tmp_path)

    with pytest.raises(KeyboardInterrupt):
        scorer_for("interrupts")._call(*sample_of())
    with pytest.raises(KeyboardInterrupt):
        await scorer_for("interrupts_async")._call_async(*sample_of())  # through no task: it would end the loop
