from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import psutil
import pytest
from blockbuster import blockbuster_ctx

from asyncrl.config.sections.rollout import RewardConfig
from asyncrl.data.sample import Prompt, Sample, Turn, VersionSpan
from asyncrl.errors import EngineError, RewardError
from asyncrl.host import EngineHost
from asyncrl.observability.waits import WAITS
from asyncrl.rollout.rewards.frames import ScoreOutcome, frame
from asyncrl.rollout.rewards.registry import Runs, resolve_reward
from asyncrl.rollout.rewards.result import ABSTAINED, RewardScope, Score
from asyncrl.rollout.rewards.scorer import Scorer

MODULE = "tests.rollout.reward_functions"


def sample_of(
    text: str = "yes", answer: str | None = "yes", record: dict[str, Any] | None = None
) -> tuple[Sample, Prompt]:
    prompt = Prompt("p:0", "prompt", np.array([1, 2, 3], np.int32), answer, record or {})
    turn = Turn(
        prompt.token_ids,
        np.array([4, 5], np.int32),
        np.array([-0.5, -1.5], np.float32),
        (VersionSpan("0.1", 0, 2),),
    )
    sample = Sample.of_turn("00000000.000", "00000000", turn, finish_reason="stop", text=text)
    return sample, prompt


@asynccontextmanager
async def scorer_of(
    function: str,
    log_dir: Path,
    *,
    host: EngineHost | None = None,
    timeout_s: float = 20.0,
    workers: int = 1,
    scope: RewardScope = "sample",
    **args: Any,
) -> AsyncIterator[Scorer]:
    name = function if function == "exact_match" else f"{MODULE}:{function}"
    workers = workers if host is not None else 0
    config = RewardConfig(function=name, args=args, timeout_s=timeout_s, workers=workers, scope=scope)
    scorer = Scorer(resolve_reward(config.function, config.args, config.scope), config, host=host, log_dir=log_dir)
    async with anyio.create_task_group() as tasks:
        try:
            with blockbuster_ctx("asyncrl") as guard:
                guard.functions["os.stat"].can_block_in("anyio/_core/_sockets.py", "setup_unix_local_socket")
                guard.functions["io.BufferedReader.read"].can_block_in("asyncrl/host/server.py", "log_tail")
                await scorer.start(tasks)
                yield scorer
        finally:
            await scorer.aclose()


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[EngineHost]:
    async with EngineHost.start(tmp_path) as running:
        yield running


# names and arguments


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(RewardError, match="did you mean 'exact_match'"):
        resolve_reward("exact_mach", {})
    with pytest.raises(RewardError, match="known are exact_match, length, math_verify, reasoning_gym"):
        resolve_reward("zzz", {})


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no.such:f", "module 'no.such' does not import"),
        (f"{MODULE}:nothing", "has no 'nothing'"),
        (f"{MODULE}:", "is not of the form package.module:function"),
        (f"{MODULE}:os", "is not a function but module"),
    ],
)
def test_a_path_that_does_not_import_is_one_clear_error(path: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        resolve_reward(path, {})


def test_a_module_next_to_the_recipe_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_reward_beside.py").write_text("def f(sample, prompt):\n    return 1\n")
    (tmp_path / "my_broken_reward.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert resolve_reward("my_reward_beside:f", {}).runs is Runs.WORKER
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        resolve_reward("my_broken_reward:f", {})


def test_arguments_that_the_function_does_not_take_are_refused_at_once() -> None:
    with pytest.raises(RewardError, match=r"reward.args: length is called as \(sample, prompt, \*\*args\).*'target'"):
        resolve_reward("length", {})
    with pytest.raises(RewardError, match=r"it takes bonus; did you mean bonus\?"):
        resolve_reward(f"{MODULE}:good", {"bonsu": 1})


def test_async_functions_are_recognised_and_run_in_the_loop() -> None:
    assert resolve_reward(f"{MODULE}:good_async", {}).runs is Runs.LOOP
    assert resolve_reward(f"{MODULE}:partly_bound", {}).runs is Runs.LOOP
    assert resolve_reward(f"{MODULE}:good", {}).runs is Runs.WORKER


@pytest.mark.parametrize(
    ("function", "scope", "message"),
    [
        (
            "ranks",
            "sample",
            r'called as \(sample, prompt, .* parameter is `samples`; set reward.scope = "group"',
        ),
        (
            "good",
            "group",
            r'called as \(samples, prompt, .* parameter is `sample`; set reward.scope = "sample"',
        ),
    ],
)
def test_a_function_that_scores_something_else_than_the_scope_says_is_refused(
    function: str, scope: RewardScope, message: str
) -> None:
    with pytest.raises(RewardError, match=message):
        resolve_reward(f"{MODULE}:{function}", {}, scope)
    assert resolve_reward(f"{MODULE}:{function}", {}, "group" if scope == "sample" else "sample").runs is Runs.WORKER


# the rewards that come with the project


@pytest.mark.parametrize(
    ("args", "text", "reward"),
    [({}, " yes\n", 1.0), ({}, "Yes", 0.0), ({"ignore_case": True}, "YES", 1.0), ({"strip": False}, "yes ", 0.0)],
)
def test_exact_match(args: dict[str, Any], text: str, reward: float) -> None:
    assert resolve_reward("exact_match", args).call(*sample_of(text)) == reward


def test_length_falls_off_on_both_sides() -> None:
    assert [resolve_reward("length", {"target": t}).call(*sample_of()) for t in (2, 4, 1)] == [1.0, 0.5, 0.0]


def test_math_verify_compares_symbolically_and_rejects_unreadable_answers() -> None:
    reward = resolve_reward("math_verify", {}).call
    assert reward(*sample_of(r"so it is $\frac{2}{4}$", "0.5")) == 1.0
    assert reward(*sample_of("it is 3", "4")) == 0.0
    assert reward(*sample_of("gibberish without a number", "4")) == 0.0
    with pytest.raises(ValueError, match="cannot read the reference answer"):
        reward(*sample_of("4", ""))


def test_reasoning_gym_scores_by_the_entrys_own_task() -> None:
    import reasoning_gym

    entry = reasoning_gym.create_dataset("leg_counting", size=1, seed=1)[0]
    reward = resolve_reward("reasoning_gym", {}).call
    tagged = resolve_reward("reasoning_gym", {"answer_tag": "answer"}).call
    assert reward(*sample_of(entry["answer"], record=entry)) == 1.0
    assert reward(*sample_of("wrong", record=entry)) < 0.5
    assert tagged(*sample_of(f"hm <answer>{entry['answer']}</answer>", record=entry)) == 1.0
    with pytest.raises(ValueError, match="names no reasoning_gym task"):
        reward(*sample_of())


async def test_a_missing_reference_answer_is_a_failure_and_no_zero(tmp_path: Path) -> None:
    async with scorer_of("exact_match", tmp_path) as scorer:
        score = await scorer.score(*sample_of(answer=None))
        assert score.reward is None and "set data.answer_key" in str(score.failure)
        assert scorer.failures.total() == 1


# what functions may do, wherever they run


@pytest.mark.parametrize(
    ("what", "reward", "failure"),
    [
        ("true", 1.0, None),
        ("float32", 0.5, None),
        ("scalar", 0.25, None),
        ("nan", None, "the reward is nan"),
        ("inf", None, "the reward is inf"),
        ("none", None, "returned NoneType, not a number"),
        ("text", None, "returned str, not a number"),
        ("list", None, "returned list, not a number"),
        ("coroutine", None, "returned a coroutine; declare it with `async def`"),
        ("beyond float32", None, "the reward is -1e+39, which float32 cannot hold"),
        ("rounds to infinity", None, "which float32 cannot hold"),
        ("largest", 3.4028234e38, None),
        ("beyond float64", None, "which float32 cannot hold"),
        ("a part beyond", None, "part 'length' of the reward is 1e+39, which float32 cannot hold"),
        ("no score", None, "returned no `score`, and 'correct' of its dict is str, no number"),
        ("score is text", None, "returned str as 'score', not a number"),
        ("empty", None, "returned an empty dict"),
    ],
)
async def test_only_numbers_that_training_can_hold_are_rewards(
    tmp_path: Path, what: str, reward: float | None, failure: str | None
) -> None:
    async with scorer_of("returns", tmp_path, what=what) as scorer:
        score = await scorer.score(*sample_of())
        assert score.reward == reward
        assert failure is None if score.failure is None else failure is not None and failure in score.failure


@pytest.mark.parametrize("worker", [False, True], ids=["here", "in a worker"])
@pytest.mark.parametrize(
    ("what", "reward", "parts"),
    [
        ("scored", 0.5, {"format": 1.0}),
        ("rewarded", 0.25, {"length": 7.0}),
        ("summed", 1.25, {"correct": 1.0, "format": 0.25}),
        ("true", 1.0, {}),
    ],
)
async def test_a_dict_is_a_reward_and_its_parts(
    tmp_path: Path, host: EngineHost, what: str, reward: float, parts: dict[str, float], worker: bool
) -> None:
    async with scorer_of("returns", tmp_path, host=host if worker else None, what=what) as scorer:
        score = await scorer.score(*sample_of())
        assert (score.reward, score.parts, score.failure) == (reward, parts, None)


async def test_an_async_function_runs_under_a_deadline(tmp_path: Path) -> None:
    async with scorer_of("good_async", tmp_path, bonus=0.5) as scorer:
        assert (await scorer.score(*sample_of())).reward == 1.5
    async with scorer_of("endless_async", tmp_path, timeout_s=0.05) as scorer:
        assert (await scorer.score(*sample_of())).failure == "the reward took longer than 0.05 s and was ended"
    async with scorer_of("raises_async", tmp_path) as scorer:
        assert str((await scorer.score(*sample_of())).failure).startswith("TimeoutError: mine (")


async def test_without_workers_a_sync_function_runs_here(tmp_path: Path) -> None:
    async with scorer_of("where", tmp_path, file=str(tmp_path / "pid")) as scorer:
        assert (await scorer.score(*sample_of())).reward == 1.0
        assert (tmp_path / "pid").read_text() == str(os.getpid())


# workers


def test_a_worker_starts_without_torch() -> None:
    code = "import sys, asyncrl.rollout.rewards.worker; print({'torch', 'transformers', 'anyio'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout == b"set()\n"


async def test_a_worker_killed_or_stopped_from_outside_is_replaced(tmp_path: Path, host: EngineHost) -> None:
    pid_file = tmp_path / "pid"
    async with scorer_of("where", tmp_path, host=host, timeout_s=1.0, file=str(pid_file)) as scorer:
        assert (await scorer.score(*sample_of())).reward == 1.0
        os.kill(int(pid_file.read_text()), signal.SIGKILL)
        await host.wait("reward-worker-0.0")
        assert (await scorer.score(*sample_of())).failure == "the reward worker died (exit code -9)"
        assert (await scorer.score(*sample_of())).reward == 1.0
        worker = psutil.Process(int(pid_file.read_text()))
        worker.suspend()
        with anyio.fail_after(10):  # it stops at the end of a system call
            while worker.status() != psutil.STATUS_STOPPED:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        assert (await scorer.score(*sample_of())).failure == "the reward took longer than 1 s and was ended"
        assert (await scorer.score(*sample_of())).reward == 1.0


async def test_the_death_of_the_host_is_the_error_that_is_raised(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as error:
        async with EngineHost.start(tmp_path) as host, scorer_of("good", tmp_path, host=host) as scorer:
            os.kill(host.pid, signal.SIGKILL)
            await host_gone(host)
            with anyio.fail_after(20):
                while True:  # its guardian ends the worker a moment later
                    await scorer.score(*sample_of())
    assert error.group_contains(EngineError, match="engine host")


async def host_gone(host: EngineHost) -> None:
    with pytest.raises(EngineError):
        await host.wait("reward-worker-0.0")


async def test_a_worker_scores_in_its_own_main_thread_and_sees_everything(tmp_path: Path, host: EngineHost) -> None:
    record = {"nested": {"list": [1, None, "x"]}}
    async with scorer_of("sees", tmp_path, host=host) as scorer:
        assert (await scorer.score(*sample_of(record=record))).reward == 1.0
        unsendable = await scorer.score(*sample_of(record={"x": object()}))
        assert "a record field of type object cannot be sent" in str(unsendable.failure)
        assert (await scorer.score(*sample_of(record=record))).reward == 1.0
    async with scorer_of("in_main_thread", tmp_path, host=host) as scorer:
        assert (await scorer.score(*sample_of())).reward == 1.0


async def test_a_hanging_dying_or_raising_call_fails_its_own_sample_only(tmp_path: Path, host: EngineHost) -> None:
    texts = ["yes", "hang", "yes", "die", "no", "raise", "yes"]
    scores: dict[int, Any] = {}
    async with scorer_of("by_text", tmp_path, host=host, timeout_s=1.0) as scorer:

        async def one(index: int) -> None:
            scores[index] = await scorer.score(*sample_of(texts[index]))

        async with anyio.create_task_group() as tasks:
            for index in range(len(texts)):
                tasks.start_soon(one, index)
        assert [scores[i].reward for i in range(7)] == [1.0, None, 1.0, None, 0.0, None, 1.0]
        assert scores[1].failure == "the reward took longer than 1 s and was ended"
        assert scores[3].failure == "the reward worker died (exit code 7)"
        assert scores[5].failure.startswith("ValueError: no idea (") and "reward_functions.py" in scores[5].failure


@pytest.mark.parametrize("function", ["stubborn", "loops_in_math"])
async def test_a_call_that_no_signal_reaches_is_ended_too(tmp_path: Path, host: EngineHost, function: str) -> None:
    with anyio.fail_after(30):
        async with scorer_of(function, tmp_path, host=host, timeout_s=0.3) as scorer:
            assert "longer than 0.3 s" in str((await scorer.score(*sample_of())).failure)


async def test_no_path_is_too_long_for_the_workers(
    tmp_path: Path, host: EngineHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("d" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    async with scorer_of("good", long, host=host) as scorer:
        assert (await scorer.score(*sample_of())).reward == 1.0


async def test_waiting_in_the_queue_is_no_wait_to_complain_of(tmp_path: Path, host: EngineHost) -> None:
    async with scorer_of("endless", tmp_path, host=host) as scorer, anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(scorer.score, *sample_of())
        await anyio.wait_all_tasks_blocked()
        queued = [wait for wait in WAITS.snapshot() if wait.what == "reward" and MODULE in wait.subject]
        assert [wait.deadline_s for wait in queued] == [math.inf, math.inf]
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    "what",
    ["ffffffff", "03000000c1c1c1", frame(ScoreOutcome(999, (Score(1.0),))).hex(), "0100000090"],
    ids=["an endless frame", "no msgpack", "an answer to another job", "an empty answer"],
)
async def test_a_function_that_writes_into_the_workers_socket_costs_its_own_sample_only(
    tmp_path: Path, host: EngineHost, what: str
) -> None:
    async with scorer_of("garbles", tmp_path, host=host, what=what) as scorer:
        assert (await scorer.score(*sample_of())).reward == 1.0
        assert "garbled" in str((await scorer.score(*sample_of("garble"))).failure)
        assert (await scorer.score(*sample_of())).reward == 1.0


async def test_a_function_that_forks_answers_once(tmp_path: Path, host: EngineHost) -> None:
    async with scorer_of("forks", tmp_path, host=host) as scorer:
        for _ in range(5):
            assert (await scorer.score(*sample_of())).reward == 1.0
        assert scorer._pool is not None and scorer._pool.replaced == 0


async def test_a_worker_is_the_first_to_go_when_memory_is_short(tmp_path: Path, host: EngineHost) -> None:
    async with scorer_of("where", tmp_path, host=host, file=str(tmp_path / "pid")) as scorer:
        await scorer.score(*sample_of())
        pid = (tmp_path / "pid").read_text()
        assert await anyio.Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"


async def test_a_closed_scorer_gives_a_failure(tmp_path: Path, host: EngineHost) -> None:
    async with scorer_of("good", tmp_path, host=host) as scorer:
        await scorer.aclose()
        assert (await scorer.score(*sample_of())).failure == "the reward workers were closed"


async def test_closing_the_pool_ends_its_processes_and_answers_who_waits(tmp_path: Path, host: EngineHost) -> None:
    config = RewardConfig(function=f"{MODULE}:endless", timeout_s=60)
    scorer = Scorer(resolve_reward(config.function, {}), config, host=host, log_dir=tmp_path)
    failures: list[str | None] = []

    async def one() -> None:
        failures.append((await scorer.score(*sample_of())).failure)

    async with anyio.create_task_group() as tasks:
        await scorer.start(tasks)
        for _ in range(3):
            tasks.start_soon(one)
        await anyio.wait_all_tasks_blocked()
        with anyio.fail_after(10):
            await scorer.aclose()
            await scorer.aclose()
    assert failures == ["the reward workers were closed"] * 3
    ended = await host.wait("reward-worker-0.0")
    assert ended.requested


async def test_a_cancelled_wait_does_not_disturb_the_worker(tmp_path: Path, host: EngineHost) -> None:
    async with scorer_of("good", tmp_path, host=host) as scorer:
        for _ in range(20):
            with anyio.move_on_after(0):
                await scorer.score(*sample_of("no"))
            assert (await scorer.score(*sample_of())).reward == 1.0
        assert scorer._pool is not None and scorer._pool.replaced == 0


async def cannot_start(
    host: EngineHost, monkeypatch: pytest.MonkeyPatch, directory: Path, statement: str, match: str
) -> None:
    """The reward of a module that runs `statement` while a worker imports it, and not in this process."""
    name = f"reward_of_{directory.name}"
    source = f"import os, time\nif os.getpid() != {os.getpid()}: {statement}\ndef f(s, p): return 1\n"
    (directory / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(directory))
    config = RewardConfig(function=f"{name}:f")
    scorer = Scorer(resolve_reward(config.function, {}), config, host=host, log_dir=directory)
    async with anyio.create_task_group() as tasks:
        with pytest.raises(RewardError, match=match):
            await scorer.start(tasks)
        await scorer.aclose()


async def test_a_worker_that_cannot_import_what_the_driver_can_is_an_error_at_the_start(
    tmp_path: Path, host: EngineHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cannot_start(host, monkeypatch, tmp_path, "raise OSError('not here')", "OSError: not here")


async def test_a_worker_that_dies_while_importing_shows_its_last_words(
    tmp_path: Path, host: EngineHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = "os.write(2, b'farewell'), os._exit(9)"
    await cannot_start(host, monkeypatch, tmp_path, last, r"(?s)exit code 9.*farewell")


# rewards of groups


def group_of(*texts: str) -> tuple[list[Sample], Prompt]:
    pairs = [sample_of(text) for text in texts]
    return [msgspec.structs.replace(s, sample_id=f"g.{i:03d}") for i, (s, _) in enumerate(pairs)], pairs[0][1]


@pytest.mark.parametrize("in_worker", [False, True])
async def test_a_group_is_scored_in_one_call(tmp_path: Path, host: EngineHost, in_worker: bool) -> None:
    where = host if in_worker else None
    async with scorer_of("ranks", tmp_path, host=where, scope="group", bonus=1.0) as scorer:
        assert scorer.by_group
        scores = await scorer.score_together(*group_of("yes", "", "no"))
        assert scores == (Score(1 + 1 / 3), Score(None, ABSTAINED), Score(1 + 2 / 3)) and not scorer.failures
        assert await scorer.score_together(*group_of("no")) == (Score(2.0),)


async def test_an_async_function_may_score_a_group_and_return_an_array(tmp_path: Path) -> None:
    async with scorer_of("ranks_async", tmp_path, scope="group") as scorer:
        assert [s.reward for s in await scorer.score_together(*group_of("a", "b", "c"))] == [0.0, 1.0, 2.0]


async def test_a_call_for_a_group_that_hangs_dies_or_raises_fails_each_of_its_samples_and_no_other_group(
    tmp_path: Path, host: EngineHost
) -> None:
    async with scorer_of("ranks", tmp_path, host=host, timeout_s=1.0, scope="group") as scorer:
        for text, failure in [
            ("hang", "the reward took longer than 1 s and was ended"),
            ("die", "the reward worker died (exit code 7)"),
            ("raise", "ValueError: no idea ("),
        ]:
            scores = await scorer.score_together(*group_of(text, "yes", "no"))
            assert all(s.reward is None and str(s.failure).startswith(failure) for s in scores) and len(scores) == 3
            assert [s.reward for s in await scorer.score_together(*group_of("yes", "no"))] == [0.5, 1.0]
    assert scorer.failures.total() == 9, "each sample counts"


@pytest.mark.parametrize(
    ("what", "failures"),
    [
        ("number", ["the reward function returned one number; with reward.scope = group"] * 3),
        ("text", ["the reward function returned str, not a number; with reward.scope = group"] * 3),
        ("few", ["the reward function returned 1 numbers for 3 samples"] * 3),
        ("many", ["the reward function returned more than 3 numbers for 3 samples"] * 3),
        ("nan", ["None", "the reward is nan", "the reward function returned str, not a number"]),
    ],
)
async def test_a_group_needs_one_number_for_each_sample(tmp_path: Path, what: str, failures: list[str]) -> None:
    async with scorer_of("returns_for_group", tmp_path, scope="group", what=what) as scorer:
        scores = await scorer.score_together(*group_of("a", "b", "c"))
    assert all(str(s.failure).startswith(f) for s, f in zip(scores, failures, strict=True))
