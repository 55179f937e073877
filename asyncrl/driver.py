"""From the command line to the exit code: the frame of every entrypoint's loop.

Invariants
- An expected failure is one message on stderr and a non-zero exit code; a defect keeps its traceback.
- However the job ends, it disposes of all parts that it built, and the run directory says how it ended. Each stage of
  the end is bounded by a few times `run.stop_grace_s`, after a success and after a failure.
- Ranks other than 0 run the trainer alone, and only rank 0 reports a failure.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import anyio

from asyncrl.config import Config
from asyncrl.config.environment import rank_settings
from asyncrl.config.layout import DRIVER_NODE
from asyncrl.config.reading.loaded import LoadedConfig
from asyncrl.config.reading.loading import load_config
from asyncrl.data.dotted_path import resolve_dotted_path
from asyncrl.errors import AsyncRLError, ModelError, RunDirectoryError, describe_exception
from asyncrl.exit_protocol import RankZeroExit, keep_graceful_stop, prepare_rank
from asyncrl.host import EngineHost
from asyncrl.host.open_files import raise_open_files
from asyncrl.observability.display import make_display
from asyncrl.observability.events import EventLog, JobEnded, JobStarted
from asyncrl.observability.logging import logging_to
from asyncrl.observability.metrics import MetricsLog
from asyncrl.observability.watchdog import LoopMonitor, dump_on_signal, watch_stalls
from asyncrl.run.job import Job
from asyncrl.run.pauses import Pauses
from asyncrl.run.recorder import Recorder, conclude, conclude_failure
from asyncrl.run.turns import make_turns
from asyncrl.run_directory import RunDirectory
from asyncrl.tasks import MAY_NOT_RETURN, Background
from asyncrl.training.backends import check_trainable

Loop = Callable[[Job], Awaitable[None]]

FINISHED = "finished"

_BY_SIGNAL = 128
"""An exit code above this names the signal that ended the process."""


def run_job(loop: Loop, argv: Sequence[str] | None = None) -> int:
    """Runs `loop` as the driver on rank 0 and serves it on the other ranks; returns the exit code of the process.

    `argv` is the command line without the program's name (`@ recipe.toml --section.key value`); None takes sys.argv.
    A job that a signal stopped does not return: the process ends here, with 128 + n. Nor does one that leaves a thread
    behind whose call never returned.
    """
    rank_exit = prepare_rank()
    raise_open_files()
    try:
        loaded = load_config(sys.argv[1:] if argv is None else argv, dry_check=check_start)
        os.environ.update(rank_settings(os.environ, loaded.layout, loaded.config))
        if rank_exit is not None:
            rank_exit.allow(loaded.config.run.stop_grace_s)
        code = _drive(loop, loaded) if loaded.machine.rank == 0 else _serve(loaded)
    except KeyboardInterrupt:  # of rank 0, where the exit protocol was not armed yet
        code = 128 + signal.SIGINT
        print("stopped by SIGINT", file=sys.stderr, flush=True)
    except AsyncRLError as error:
        code = error.exit_code
        if rank_exit is None:
            _tell(error)
    if rank_exit is not None:
        rank_exit.expect_exit(code)
    elif code > _BY_SIGNAL or any(thread.name.startswith(MAY_NOT_RETURN) for thread in threading.enumerate()):
        # All is disposed of. A thread that imports torch or reads data for the job would be waited for, in vain.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _drive(loop: Loop, loaded: LoadedConfig) -> int:
    """Rank 0: everything around the event loop."""
    _build_model(loaded.config)
    check_trainable(loaded.config)
    with ExitStack() as stack:
        keep_graceful_stop()  # before `asyncrl stop` can find the run
        run = stack.enter_context(RunDirectory.open(loaded.config, loaded.sources))
        stack.callback(_put_former_back, run)
        config = loaded.config.model_copy(update={"run": loaded.config.run.model_copy(update={"dir": run.path})})
        log = stack.enter_context(logging_to(run.path))
        stack.enter_context(dump_on_signal(sys.stderr))
        events = EventLog(run.events, run.attempt)
        stack.callback(events.close)
        metrics = MetricsLog(run.metrics, run.attempt)
        stack.callback(metrics.close)
        display = make_display(config.run.display, run_dir=run.path)
        stack.callback(display.stop)
        stack.callback(log.flush)  # its last lines belong above the table
        display.start(None)
        recorder = Recorder(display=display, metrics=metrics, events=events)
        events.emit(JobStarted(pid=os.getpid(), ranks=loaded.machine.world_size, total_steps=config.train.num_steps))
        outcome = Outcome()
        rank_exit = RankZeroExit(config.run.stop_grace_s, tell=display.note)
        try:
            with outcome.recorded(events), _first_expected_error():
                anyio.run(
                    partial(_run, loop, loaded, config, run, events, recorder, outcome, rank_exit),
                    backend_options={"use_uvloop": True},
                )
        except Exception:  # of any kind: concluded here, and raised on
            rank_exit.expect_exit(outcome.exit_code)
            conclude_failure(recorder, outcome.reason, run_dir=run.path, model=config.model.path)
            raise
        finally:
            rank_exit.expect_exit(outcome.exit_code)
            if outcome.reason == FINISHED:
                with suppress(RunDirectoryError):  # a directory that resists is told by `_put_former_back`
                    run.let_former_go()  # also where the loop had no step
        log.flush()
        display.stop()
        if recorder.steps or outcome.reason == FINISHED:
            conclude(recorder, outcome.reason, run_dir=run.path, model=config.model.path)
            rank_exit.expect_exit(outcome.exit_code)
        else:
            print(outcome.reason, file=sys.stderr, flush=True)
        if outcome.reason == FINISHED and (left := run.erase_former()):  # what the loop has not erased yet
            print(left, file=sys.stderr, flush=True)
        return outcome.exit_code


def _put_former_back(run: RunDirectory) -> None:
    """Where the run ends before it has trained a step, the one that it was to overwrite is there again."""
    try:
        failed = run.put_former_back()
    except RunDirectoryError as error:  # how the job ended matters more
        print(error, file=sys.stderr, flush=True)
        return
    if failed is not None:
        what = "the new one ended before its first step"
        print(f"{run.path} holds the former run again: {what}, and its files are in {failed}", file=sys.stderr)


class Outcome:
    """How the job ended."""

    def __init__(self) -> None:
        self.reason = FINISHED
        self.exit_code = 0

    @contextmanager
    def recorded(self, events: EventLog) -> Iterator[None]:
        """Writes into the event log how the body ended, with its error where it has one."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, AsyncRLError):
                self.reason, self.exit_code = str(error), error.exit_code
            elif isinstance(error, KeyboardInterrupt):
                self.reason, self.exit_code = "stopped by SIGINT", 128 + signal.SIGINT
            else:
                self.reason, self.exit_code = f"{type(error).__name__}: {error}", 1
            raise
        finally:
            events.emit(JobEnded(reason=self.reason, exit_code=self.exit_code))


async def _run(
    loop: Loop,
    loaded: LoadedConfig,
    config: Config,
    run: RunDirectory,
    events: EventLog,
    recorder: Recorder,
    outcome: Outcome,
    rank_exit: RankZeroExit,
) -> None:
    """Rank 0: everything inside the event loop."""
    with rank_exit:
        async with (
            EngineHost.start(run.logs, events, rank_exit.stop_signals) as host,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(LoopMonitor(events=events).run, name="loop monitor")
            tasks.start_soon(partial(watch_stalls, events=events), name="stall watch")
            async with AsyncExitStack() as disposal:
                pauses = Pauses()
                job = Job(
                    config=config,
                    layout=loaded.layout,
                    directory=run,
                    events=events,
                    record=recorder,
                    hosts={DRIVER_NODE: host},
                    stop=rank_exit.stop,
                    task_group=tasks,
                    background=Background(tasks),
                    pauses=pauses,
                    turns=make_turns(loaded.layout, config, pauses, recorder.note),
                    disposal=disposal,
                )
                with anyio.CancelScope() as steps:
                    tasks.start_soon(rank_exit.stop_on_signals, steps, name="stop on signals")
                    with rank_exit.bounded_end():
                        await loop(job)
                if rank_exit.stopped_by is not None:
                    await _keep_what_is_safe(job, rank_exit.leave_by)
                if rank_exit.stop.requested:
                    when = "after a finished step" if recorder.steps else "before the first step"
                    outcome.reason = f"stopped on request {when}"
            tasks.cancel_scope.cancel()
        if rank_exit.stopped_by is not None:
            outcome.reason = f"stopped by {rank_exit.stopped_by.name}"
            outcome.exit_code = rank_exit.exit_code or 1


async def _keep_what_is_safe(job: Job, leave_by: float | None) -> None:
    """After a signal: calls `job.on_stop_now`, within `checkpoint_grace_s`. The rest of the grace is for the disposal.

    The time in which the loop itself ended counts too, for instance the end of a publication.
    """
    run = job.config.run
    left_s = run.checkpoint_grace_s
    if leave_by is not None:
        left_s = max(leave_by - (run.stop_grace_s - run.checkpoint_grace_s) - time.monotonic(), 0.0)
    with anyio.move_on_after(left_s):
        for keep in job.on_stop_now:
            await keep()


def _serve(loaded: LoadedConfig) -> int:
    """Ranks >= 1: execute the commands of rank 0."""
    if loaded.config.debug.rollout_only:
        return 0
    from asyncrl.training.ranks.rank import serve_rank

    with logging_to(None, rank=loaded.machine.rank):
        serve_rank(loaded.config)
    return 0


def _build_model(config: Config) -> None:
    """Has `model.builder` make the model, where there is a builder and no model yet."""
    if config.model.builder is None or (config.model.path / "config.json").exists():
        return
    build = resolve_dotted_path(config.model.builder, setting="model.builder", error=ModelError)
    try:
        build(config.model.path)
    except AsyncRLError:
        raise
    except Exception as error:  # the user's function may raise anything
        raise ModelError(
            f"model.builder: {config.model.builder} failed to make {config.model.path}: {describe_exception(error)}"
        ) from error


def check_start(loaded: LoadedConfig) -> None:
    """Makes the checks of the start that need no data, as a dry run does; raises AsyncRLError."""
    config = loaded.config
    RunDirectory.check(config)
    if (config.model.path / "config.json").exists():
        check_trainable(config)
    elif config.model.builder is not None:
        resolve_dotted_path(config.model.builder, setting="model.builder", error=ModelError)
    if config.eval.function is not None:
        from asyncrl.rollout.evaluation_process import find_function

        find_function(config.eval)
    if ":" in config.train.algorithm:
        from asyncrl.algorithms.chosen import make_algorithm

        make_algorithm(config)
    if not config.debug.train_only:
        from asyncrl.rollout.start_checks import check_rollouts

        check_rollouts(config)


@contextmanager
def _first_expected_error() -> Iterator[None]:
    """Raises the first AsyncRLError of an exception group in its place: task groups wrap the errors of their tasks."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException | None = group.subgroup(AsyncRLError)
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if error is None:
            raise
        raise error from group


def _tell(error: AsyncRLError) -> None:
    """Prints one message. Under torchrun the agent gets it too, and repeats it in its own report."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        Path(error_file).write_text(
            json.dumps({"message": {"message": str(error), "extraInfo": {"timestamp": str(int(time.time()))}}})
        )
