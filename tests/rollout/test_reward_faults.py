"""What a reward function, or the machine, can do to the run: one sample fails at most, and who is at fault is told."""

from __future__ import annotations

import errno
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import psutil
import pytest

from asyncrl.config.sections.rollout import RewardConfig
from asyncrl.errors import EngineError, HostLostError, RewardError
from asyncrl.host import EngineHost, ProcessExit, ProcessSpec
from asyncrl.observability.waits import WAITS
from asyncrl.rollout.rewards import pool, scorer
from asyncrl.rollout.rewards.registry import resolve_reward
from asyncrl.rollout.rewards.scorer import Scorer
from tests.rollout.reward_functions import may_return
from tests.rollout.test_rewards import MODULE, cannot_start, host, sample_of, scorer_of

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
    tmp_path: Path, one_thread: anyio.CapacityLimiter, told_to_return: None
) -> None:
    rewards: list[float | None] = []
    async with scorer_of("hangs_until_told", tmp_path) as scorer, anyio.create_task_group() as tasks:

        async def one() -> None:
            rewards.append((await scorer.score(*sample_of())).reward)

        for _ in range(4):
            tasks.start_soon(one)
        await anyio.wait_all_tasks_blocked()
        # a deadline and its entry among the waits are one thing
        assert [wait.what for wait in WAITS.snapshot()] == ["reward"], "the clock of the first runs, and no other"
        may_return.set()
    assert rewards == [1.0] * 4


async def test_rewards_need_no_thread_that_the_drivers_file_work_has(
    tmp_path: Path, one_thread: anyio.CapacityLimiter
) -> None:
    async with one_thread, scorer_of("good", tmp_path, timeout_s=10.0) as scorer:
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
    sample, prompt = sample_of()

    def scorer_for(function: str) -> Scorer:
        config = RewardConfig(function=f"{MODULE}:{function}", workers=0)
        return Scorer(resolve_reward(config.function, {}), config, host=None, log_dir=tmp_path)

    with pytest.raises(KeyboardInterrupt):
        scorer_for("interrupts")._call((sample,), prompt)
    with pytest.raises(KeyboardInterrupt):
        await scorer_for("interrupts_async")._call_async((sample,), prompt)  # through no task: it would end the loop


# workers that do not start


class ShortOfProcesses:
    """The host, except that it refuses to spawn all workers but the first while there are `errors` to raise."""

    def __init__(self, host: EngineHost, errors: list[EngineError]) -> None:
        self._host = host
        self.errors = errors
        self.kill, self.wait = host.kill, host.wait

    async def spawn(self, spec: ProcessSpec) -> int:
        if self.errors and not spec.name.endswith(".0"):
            raise self.errors.pop(0)
        return await self._host.spawn(spec)


@pytest.fixture
def short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_PAUSE_S", 0.01, raising=False)


NO_FORK = EngineError("reward-worker-0: cannot start it: Resource temporarily unavailable")


async def lose_a_worker_and_go_on(tmp_path: Path, host: Any, **args: Any) -> None:
    async with scorer_of("by_text", tmp_path, host=host, **args) as scorer:
        assert (await scorer.score(*sample_of("die"))).failure == "the reward worker died (exit code 7)"
        assert (await scorer.score(*sample_of())).reward == 1.0


async def test_a_replacement_that_cannot_be_spawned_is_tried_again(
    tmp_path: Path, host: EngineHost, short_pause: None
) -> None:
    short = ShortOfProcesses(host, [NO_FORK] * 2)
    await lose_a_worker_and_go_on(tmp_path, short)
    assert not short.errors


async def test_tries_to_spawn_are_apart_and_the_pause_grows(
    tmp_path: Path, host: EngineHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_PAUSE_S", 0.2, raising=False)
    began = time.monotonic()
    await lose_a_worker_and_go_on(tmp_path, ShortOfProcesses(host, [NO_FORK] * 2))
    assert time.monotonic() - began > 0.6


async def test_the_third_replacement_that_cannot_be_spawned_ends_the_pool_with_the_reason(
    tmp_path: Path, host: EngineHost, short_pause: None
) -> None:
    short = ShortOfProcesses(host, [NO_FORK] * 4)
    with pytest.raises(ExceptionGroup) as error:
        await lose_a_worker_and_go_on(tmp_path, short)
    assert error.group_contains(RewardError, match=r"reward-worker-0.3 could not be spawned: .* temporarily unavailab")
    assert len(short.errors) == 1


async def test_a_host_that_is_lost_is_not_tried_again(tmp_path: Path, host: EngineHost, short_pause: None) -> None:
    short = ShortOfProcesses(host, [HostLostError("engine host: it died")] * 3)
    with pytest.raises(ExceptionGroup) as error:
        await lose_a_worker_and_go_on(tmp_path, short)
    assert error.group_contains(HostLostError, match="it died") and len(short.errors) == 2


@pytest.mark.parametrize("where", ["listen", "accept"])
async def test_a_replacement_without_a_descriptor_left_is_tried_again(
    tmp_path: Path, host: EngineHost, short_pause: None, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    create, calls = anyio.create_unix_listener, 0
    no_descriptor = OSError(errno.EMFILE, "Too many open files")

    async def refuse() -> None:
        raise anyio.BrokenResourceError from no_descriptor

    async def create_unix_listener(path: str) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2 and where == "listen":
            raise no_descriptor
        listener = await create(path)
        if calls == 2:
            monkeypatch.setattr(listener, "accept", refuse)
        return listener

    monkeypatch.setattr(anyio, "create_unix_listener", create_unix_listener)
    await lose_a_worker_and_go_on(tmp_path, host)
    assert calls == 3


# workers that live on without their socket


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_EXIT_S", 0.5, raising=False)
    monkeypatch.setattr(pool, "_END_TIMEOUT_S", 5.0)


@pytest.mark.parametrize("how", ["closerange", "execv"])
async def test_a_worker_that_lives_on_without_its_socket_is_ended_and_replaced(
    tmp_path: Path, host: EngineHost, short_patience: None, how: str
) -> None:
    pid_file = tmp_path / "pid"
    async with scorer_of("closes_its_sockets", tmp_path, host=host, how=how, file=str(pid_file)) as scorer:
        failed = await scorer.score(*sample_of("close"))
        assert failed.failure == "the reward function closed its worker's socket, and the worker was ended"
        assert (await scorer.score(*sample_of())).reward == 1.0
        assert not psutil.pid_exists(int(pid_file.read_text()))
        ended: ProcessExit = await host.wait("reward-worker-0.0")
        assert ended.requested


async def test_an_import_that_closes_the_workers_socket_is_an_error_at_the_start(
    tmp_path: Path, host: EngineHost, short_patience: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    closes = "os.closerange(3, 1024), time.sleep(3600)"
    await cannot_start(host, monkeypatch, tmp_path, closes, "closed the socket of the worker that imported it")
