"""TrainGroup over real ranks: what a command does, and what happens when a rank raises, dies or hangs in one."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog
import torch
from torch import Tensor

from asyncrl.config import Config
from asyncrl.errors import NonFiniteError, TrainerError, WeightUpdateError
from asyncrl.observability.events import EventLog
from asyncrl.observability.logging import logging_to
from asyncrl.training.ranks import ranks
from asyncrl.training.ranks.ranks import SHUTDOWN_TIMEOUT_S
from asyncrl.training.train_group import Publishing, TrainGroup
from asyncrl.weights.transfer import WeightSource
from tests.training.worlds import SPECS, Fault, ScriptedBackend, die, hang, make_batch, raise_value_error, run_world

Call = Callable[[TrainGroup], Awaitable[Any]]


class Collected:
    """A sink that keeps what it is given."""

    def __init__(self, fail_at: str | None = None) -> None:
        self.names: list[str] = []
        self.finished = False
        self._fail_at = fail_at

    def put(self, name: str, tensor: Tensor) -> None:
        if name == self._fail_at:
            raise WeightUpdateError(f"no room for {name}")
        self.names.append(name)

    def finish(self) -> None:
        self.finished = True


CALLS: dict[str, Call] = {
    "forward_backward": lambda group: group.train(0, make_batch()),
    "reset_optimizer": lambda group: group.reset_optimizer(),
    "logprobs": lambda group: group.logprobs(make_batch()),
    "export_tensors": lambda group: group.export(Collected(), 10.0),
    "export_hf": lambda group: group.export_hf(Path("/nowhere")),
    "snapshot": lambda group: group.save_checkpoint(0),
    "offload": lambda group: group.offload(),
    "onload": lambda group: group.onload(),
}


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_command_runs_on_every_rank(world_size: int, tmp_path: Path) -> None:
    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        start = await group.init(threads=3)
        sink = Collected()
        metrics = await group.train(0, make_batch())
        sft = await group.train_sft(None, make_batch(), 0.5)
        await group.reset_optimizer()
        logprobs = await group.logprobs(make_batch())
        await group.export(sink, 10.0)
        await group.export_hf(tmp_path / "export")
        saved = await group.save_model(0)
        await group.offload()
        await group.onload()
        await group.clear_memory()
        kinds = [event["kind"] for event in events.recent]
        step = group.statistics().step
        return start, metrics, sft, logprobs.tolist(), sink.names, sink.finished, saved.is_dir(), kinds, step

    world = run_world(scenario, world_size=world_size, config={"run": {"dir": str(tmp_path)}})

    start, metrics, sft, logprobs, names, finished, saved, kinds, step = world.value
    assert start == 0
    assert metrics["train/token_sum"] == 36.0 * world_size
    assert metrics["train/threads"] == 3.0 * world_size
    assert (sft["train/lr"], sft["train/token_sum"]) == (0.5, 36.0 * world_size)
    assert logprobs == (make_batch().logprobs * 2).tolist()
    assert names == [spec.name for spec in SPECS] and finished and saved
    assert (tmp_path / "export").is_dir()
    assert kinds == ["trainer_ready", "trainer_stepped"]
    assert step == 1
    assert world.exit_codes == (0,) * world_size


def test_a_supervised_step_counts_where_the_loop_says_which_it_is() -> None:
    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        steps = []
        for rollout_id in (None, 0, None, 1):
            await group.train_sft(rollout_id, make_batch(), 0.5)
            steps.append(group.statistics().step)
        return steps, [event["step"] for event in events.recent if event["kind"] == "trainer_stepped"]

    assert run_world(scenario, world_size=1).value == ([0, 1, 1, 2], [1, 2])


@pytest.mark.parametrize("method", ["init", "forward_backward", "logprobs", "export_tensors", "export_hf"])
def test_a_rank_that_raises_is_named_with_its_traceback_at_once(method: str) -> None:
    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        if method != "init":
            await group.init()
        began = time.monotonic()
        with pytest.raises(TrainerError) as caught:
            await (group.init() if method == "init" else CALLS[method](group))
        seconds = time.monotonic() - began
        with pytest.raises(TrainerError) as again:
            await group.reset_optimizer()
        return str(caught.value), str(again.value), seconds, [event["kind"] for event in events.recent]

    world = run_world(scenario, faults={(1, method): raise_value_error})

    first, again, seconds, kinds = world.value
    assert "trainer rank 1: ValueError: boom" in first
    assert "worlds.py" in first and "raise_value_error" in first, "the last frames are shown"
    assert again == first, "a broken trainer takes no further command"
    assert seconds < 10.0
    assert kinds[-1] == "trainer_rank_failed"
    assert world.exit_codes == (0, 1)


@pytest.mark.parametrize("method", ["forward_backward", "export_tensors"])
def test_a_rank_that_is_killed_is_named_and_not_the_rank_whose_collective_broke(method: str) -> None:
    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        began = time.monotonic()
        with pytest.raises(TrainerError) as caught:
            await CALLS[method](group)
        return str(caught.value), time.monotonic() - began

    world = run_world(scenario, world_size=3, faults={(2, method): die})

    message, seconds = world.value
    assert message.startswith("trainer rank 2: its process ended")
    assert seconds < 10.0
    assert world.exit_codes[2] == -9


def test_a_rank_that_hangs_is_named_with_the_place_where_it_hangs() -> None:
    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        with pytest.raises(TrainerError) as caught:
            await group.train(0, make_batch())
        began = time.monotonic()
        await group.dispose()
        return str(caught.value), time.monotonic() - began

    world = run_world(scenario, faults={(1, "forward_backward"): hang}, config={"train": {"step_timeout_s": 1.0}})

    message, dispose_s = world.value
    assert "training on rollout 0 did not end within 1 s" in message
    assert "rank 1 is at:" in message and "time.sleep(1000)" in message
    assert dispose_s < SHUTDOWN_TIMEOUT_S
    assert None not in world.exit_codes, "the hanging rank ends itself once rank 0 gave up"


def test_an_export_may_take_long_while_it_goes_on_and_ends_soon_when_it_does_not() -> None:
    class Slow(Collected):
        def put(self, name: str, tensor: Tensor) -> None:
            time.sleep(0.6)
            super().put(name, tensor)

    class Stuck(Collected):
        def finish(self) -> None:
            time.sleep(1000)

    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        slow, began = Slow(), time.monotonic()
        await group.export(slow, 1.4)
        took_s, began = time.monotonic() - began, time.monotonic()
        with pytest.raises(TrainerError) as caught:
            await group.export(Stuck(), 1.4)
        return slow.finished, took_s, str(caught.value), time.monotonic() - began

    finished, took_s, message, stuck_s = run_world(scenario, world_size=1).value
    assert finished and took_s > 1.4
    assert "exporting the weights did not go on for 1.4 s" in message and "in finish" in message
    assert stuck_s < 6.0


def test_a_rank_that_dies_while_nobody_waits_ends_the_job() -> None:
    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        await anyio.sleep_forever()

    def delayed_death() -> None:
        threading.Timer(0.3, die).start()

    with pytest.raises(AssertionError, match="TrainerError: trainer rank 1: its process ended"):
        run_world(scenario, faults={(1, "init"): delayed_death})


def test_an_error_of_our_own_keeps_its_class_across_ranks() -> None:
    def not_finite() -> None:
        raise NonFiniteError("loss is nan at step 3")

    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        with pytest.raises(NonFiniteError) as caught:
            await group.train(0, make_batch())
        return str(caught.value)

    assert (
        run_world(scenario, faults={(1, "forward_backward"): not_finite}).value
        == "trainer rank 1: loss is nan at step 3"
    )


def test_what_rank_zero_says_of_a_failure_that_all_ranks_see_is_what_is_told() -> None:
    def at_once() -> None:
        raise NonFiniteError("the batch is saved where rank 1 thinks")

    def a_little_later() -> None:
        time.sleep(0.2)
        raise NonFiniteError("the batch is saved in runs/really")

    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        ranks._BLAME_GRACE_S = 3.0  # of this process; the little later may be long on a machine that does much else
        await group.init()
        with pytest.raises(NonFiniteError) as caught:
            await group.train(0, make_batch())
        return str(caught.value)

    faults = {(1, "forward_backward"): at_once, (0, "forward_backward"): a_little_later}
    assert run_world(scenario, faults=faults).value == "the batch is saved in runs/really"


def test_every_rank_knows_the_run_directory_that_rank_zero_took(tmp_path: Path) -> None:
    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        run = group._config.run.model_copy(update={"dir": tmp_path / "taken-2"})
        group._config = group._config.model_copy(update={"run": run})
        await group.init()
        await group.export_hf(tmp_path / "out")

    def note_directory(backend: ScriptedBackend) -> None:
        (tmp_path / f"rank-{backend.layout.rank}").write_text(str(backend.config.run.dir))

    run_world(scenario, on_init=note_directory)
    assert {(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)} == {str(tmp_path / "taken-2")}


def test_a_warning_of_another_rank_is_logged_by_rank_zero(tmp_path: Path) -> None:
    def warn() -> None:
        logging.getLogger("some.library").warning("the %s is odd", "shape")
        structlog.get_logger("asyncrl.trainer").warning("a slow step", seconds=3.5, shape=(1, 2))

    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        with logging_to(tmp_path):
            await group.init()
            await group.train(0, make_batch())

    run_world(scenario, faults={(1, "forward_backward"): warn})
    lines = [json.loads(line) for line in (tmp_path / "logs" / "driver.jsonl").read_text().splitlines()]
    assert [(line["rank"], line["level"], line["event"]) for line in lines] == [
        (1, "warning", "the shape is odd"),
        (1, "warning", "a slow step"),
    ]
    assert (lines[1]["seconds"], lines[1]["shape"]) == (3.5, "(1, 2)")


class Unclosable:
    """A publisher whose end fails."""

    async def aclose(self) -> None:
        raise OSError("the directory is gone")


def test_no_step_of_the_end_keeps_another_from_its_turn() -> None:
    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        group._publisher = Unclosable()  # type: ignore[assignment]

        def cannot_leave() -> None:
            raise RuntimeError("NCCL is in a bad mood")

        torch.distributed.destroy_process_group = cannot_leave
        await group.dispose()
        return [scope.cancel_called for scope in group._ranks._serving], group._ranks._link._ending

    world = run_world(scenario)
    assert world.value == ([True, True], True)
    assert world.exit_codes == (0, 0)


def test_a_failing_sink_is_no_failure_of_a_rank_and_the_export_is_walked_to_its_end() -> None:
    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        broken, whole = Collected(fail_at="second"), Collected()
        with pytest.raises(WeightUpdateError, match="no room for second"):
            await group.export(broken, 10.0)
        await group.export(whole, 10.0)
        metrics = await group.train(0, make_batch())
        return broken.names, broken.finished, whole.names, metrics["train/calls"]

    names, finished, whole, calls = run_world(scenario).value
    assert names == ["first"] and not finished
    assert whole == [spec.name for spec in SPECS]
    assert calls == 1 + 2 * len(SPECS) + 1


async def until_at_work(group: TrainGroup) -> None:
    while group.statistics().thread.running is None:  # noqa: ASYNC110
        await anyio.sleep(0.005)


async def begin_and_give_up(group: TrainGroup) -> bool:
    """Gives a step up once the trainer thread is at it; whether it was cancelled."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(group.train, 0, make_batch())
        await until_at_work(group)
        tasks.cancel_scope.cancel()
    return tasks.cancel_scope.cancelled_caught


def test_a_cancelled_call_leaves_the_ranks_in_step() -> None:
    def slow() -> None:
        time.sleep(1.0)

    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        cancelled = await begin_and_give_up(group)
        return cancelled, await group.train_sft(None, make_batch(), 0.25)

    cancelled, metrics = run_world(scenario, faults={(1, "forward_backward"): slow}).value
    assert cancelled
    assert metrics["train/token_sum"] == 72.0


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_that_its_caller_gave_up_is_trained_and_counted_once_it_is_settled(world_size: int) -> None:
    def slow() -> None:
        time.sleep(0.3)

    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        steps = [await group.settle()]
        await begin_and_give_up(group)
        steps += [group.statistics().step, await group.settle(), await group.settle()]
        return steps, [event["step"] for event in events.recent if event["kind"] == "trainer_stepped"]

    world = run_world(scenario, world_size=world_size, faults={(0, "forward_backward"): slow})
    assert world.value == ([0, 0, 1, 1], [1])


@pytest.mark.parametrize("rank", [0, 1])
def test_what_fails_in_a_step_that_was_given_up_is_raised_where_it_is_settled(rank: int) -> None:
    def fail() -> None:
        time.sleep(0.3)
        raise_value_error()

    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        await begin_and_give_up(group)
        with pytest.raises(TrainerError) as caught:
            await group.settle()
        return str(caught.value)

    assert (
        f"trainer rank {rank}: ValueError: boom" in run_world(scenario, faults={(rank, "forward_backward"): fail}).value
    )


def test_who_settles_waits_for_a_step_and_for_nothing_else() -> None:
    def slow() -> None:
        time.sleep(0.5)

    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        await group.train(0, make_batch())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(group.logprobs, make_batch())
            await until_at_work(group)
            return await group.settle(), group.statistics().thread.running

    world = run_world(scenario, world_size=1, faults={(0, "logprobs"): slow})
    assert world.value == (1, "computing log-probs")


def test_a_step_that_was_given_up_before_it_began_is_not_trained() -> None:
    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(group.logprobs, make_batch())  # the trainer thread is at this
            await until_at_work(group)
            with anyio.move_on_after(0.05) as gave_up:
                await group.train(0, make_batch())
        return gave_up.cancelled_caught, await group.settle(), [event["kind"] for event in events.recent]

    world = run_world(scenario, world_size=1, faults={(0, "logprobs"): lambda: time.sleep(0.5)})
    assert world.value == (True, 0, ["trainer_ready"])


def test_what_an_abandoned_call_raises_breaks_the_trainer() -> None:
    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        await begin_and_give_up(group)
        with pytest.raises(TrainerError) as caught:
            await group.reset_optimizer()
        return str(caught.value)

    def slow_failure() -> None:
        time.sleep(1.0)
        raise_value_error()

    assert "boom" in run_world(scenario, world_size=1, faults={(0, "forward_backward"): slow_failure}).value


def test_ranks_do_not_outlive_rank_0() -> None:
    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        os.kill(os.getpid(), 9)

    world = run_world(scenario)
    assert world.exit_codes == (-9, 1)


@pytest.mark.parametrize("fault", [raise_value_error, hang], ids=["raising", "hanging"])
def test_a_rank_stuck_in_a_collective_does_not_outlive_a_failed_job(fault: Fault) -> None:
    """Rank 2 waits in a barrier that rank 1 will never reach."""

    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        with pytest.raises(TrainerError):
            await group.train(0, make_batch())

    world = run_world(
        scenario, world_size=3, faults={(1, "forward_backward"): fault}, config={"train": {"step_timeout_s": 1.0}}
    )
    assert world.exit_codes[0] == 0
    assert None not in world.exit_codes


def test_a_batch_arrives_as_it_was_sent() -> None:
    """Every field, so that a new one cannot be forgotten."""
    from asyncrl.training.ranks.command_channel import _split

    batch = make_batch()
    header, tensors = _split(batch)
    sent = {"columns" if h.column else h.name for h in header.tensors} | set(header.rest)
    assert batch.columns and sent == {field.name for field in dataclasses.fields(batch)}
    assert [tuple(t.shape) for t in tensors] == [h.shape for h in header.tensors]
    for h, tensor in zip(header.tensors, tensors, strict=True):
        assert torch.equal(batch.columns[h.name] if h.column else getattr(batch, h.name), tensor)


class Noting:
    """A publisher that notes what it is asked for."""

    def __init__(self, source: WeightSource) -> None:
        self.source = source
        self.versions: list[str] = []

    async def publish(self, version: str) -> None:
        self.versions.append(version)

    async def leave_copy(self, newer_than: int, place: Path) -> None: ...

    async def aclose(self) -> None: ...


def test_weights_are_published_under_the_version_that_the_run_gives_to_their_step() -> None:
    async def scenario(_: TrainGroup, events: EventLog) -> Any:
        publishers: list[Any] = []

        def make_publisher(source: WeightSource) -> Any:
            publishers.append(Noting(source))
            return publishers[-1]

        async with anyio.create_task_group() as task_group:
            group = TrainGroup(
                Config(),
                task_group=task_group,
                make_backend=ScriptedBackend,
                events=events,
                publishing=Publishing(make_publisher, version_of=lambda step: f"7.{step}"),
            )
            await group.init()
            await group.update_weights()
            await group.train(0, make_batch())
            await group.update_weights()
            await group.update_weights(4)
            specs = publishers[0].source.payload.specs
            await group.dispose()
        return publishers[0].versions, [spec.name for spec in specs], events.attempt

    versions, names, attempt = run_world(scenario, world_size=1).value
    assert versions == ["7.0", "7.1", "7.5"] and attempt != 7
    assert names == [spec.name for spec in SPECS]


def test_a_trainer_without_engines_has_nobody_to_publish_to() -> None:
    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        with pytest.raises(WeightUpdateError, match="this trainer was built without engines"):
            await group.update_weights()

    run_world(scenario, world_size=1)


def test_the_columns_of_the_algorithm_and_those_that_the_batch_came_with_reach_every_rank() -> None:
    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        batch = dataclasses.replace(make_batch(), columns={"weight": torch.linspace(1, 2, 9)})
        return await group.train(0, batch)

    metrics = run_world(scenario).value
    assert metrics["train/column_sum.weight"] == pytest.approx(2 * 13.5)
    advantage = 0.5 / (0.5**0.5 + 1e-6)  # rewards 0 and 1: their mean is 0.5, their standard deviation sqrt(0.5)
    assert metrics["train/column_sum.advantages"] == pytest.approx(2 * advantage * (4 - 5))
    assert metrics["train/groups_without_signal"] == 0.0
