"""WorkerPool: runs a sync reward function in processes that can be killed.

A call scores one sample, or all samples of a group.

Invariants
- One task owns one worker, sends it one call at a time, and starts the clock of a call when it sends it: time spent in
  the queue or in starting a worker never counts against a call.
- A worker that exceeds the time limit, dies, or closes its socket fails the one call that it had. It is killed and
  replaced, and the queue goes on.
- The start of a replacement is tried `_STARTS` times, with pauses between; then the pool ends with a RewardError that
  says why. The loss of the host ends the pool at once.
- A frame that is no answer to the call fails the call and costs the worker: the user's function may write to any open
  descriptor.
- A task that waits for a score may be cancelled at any time: the worker's protocol stays in step.
"""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import anyio
import anyio.lowlevel
import structlog
from anyio.abc import SocketListener, SocketStream, TaskGroup, TaskStatus

from asyncrl.data.sample import Prompt, Sample
from asyncrl.errors import AsyncRLError, EngineError, HostLostError, RewardError
from asyncrl.host import ProcessExit, ProcessSpec
from asyncrl.observability.waits import WAITS, waiting
from asyncrl.rollout.rewards.frames import ScoreOutcome, Setup, Started, call_of, frame
from asyncrl.rollout.rewards.registry import RewardFunction
from asyncrl.rollout.rewards.result import Score, failed
from asyncrl.rollout.rewards.worker_connection import Garbled, WorkerConnection, WorkerDied, is_ours
from asyncrl.served import declared_models

T = TypeVar("T")
log = structlog.get_logger(__name__)

_START_TIMEOUT_S = 120.0  # imports of the user's module, on a machine where engines start at the same time
_END_TIMEOUT_S = 30.0
_EXIT_S = 5.0  # from the end of a worker's socket to its exit, with the dump of its memory and the host's report
_STARTS = 3  # tries to replace a worker before the run is given up
_PAUSE_S = 1.0  # times the starts that failed: processes, descriptors or memory that are short may be free again


class ProcessHost(Protocol):
    """The part of the engine host that the pool needs."""

    async def spawn(self, spec: ProcessSpec) -> int:
        """Starts a process; its pid."""
        ...

    async def kill(self, name: str) -> ProcessExit:
        """Kills a process and waits for its exit."""
        ...

    async def wait(self, name: str) -> ProcessExit:
        """Waits for the exit of a process."""
        ...


@dataclass(slots=True, eq=False)
class _Request:
    samples: Sequence[Sample]
    prompt: Prompt
    done: anyio.Event = field(default_factory=anyio.Event)
    outcome: tuple[Score, ...] | str = "the reward workers were closed"
    """The scores, or why the call failed."""
    abandoned: bool = False
    """No task waits for it any more."""

    @property
    def scores(self) -> tuple[Score, ...]:
        """One for each sample."""
        return failed(len(self.samples), self.outcome) if isinstance(self.outcome, str) else self.outcome


class WorkerPool:
    """`size` workers for one function; `start` it in a task group, `aclose` it."""

    def __init__(
        self,
        host: ProcessHost,
        function: RewardFunction,
        *,
        size: int,
        timeout_s: float,
        log_dir: Path,
        name: str = "",
    ) -> None:
        """`name` tells the workers of several pools of one host apart."""
        self._host = host
        self._function = function
        self._size = size
        self._timeout_s = timeout_s
        self._log_dir = log_dir
        self._prefix = f"{name}-" if name else ""
        self._send, self._receive = anyio.create_memory_object_stream[_Request](max_buffer_size=1 << 20)
        self._scope = anyio.CancelScope()
        self._ended: anyio.Event | None = None
        self.replaced = 0
        """Workers that were killed or died, and were replaced."""

    async def start(self, task_group: TaskGroup) -> None:
        """Returns when every worker has imported the function. RewardError when one cannot."""
        self._ended = anyio.Event()
        await task_group.start(self._run)

    async def score(self, samples: Sequence[Sample], prompt: Prompt) -> tuple[Score, ...]:
        """The scores of one call; a time limit, an exception or a dead worker becomes the failure of its samples."""
        request = _Request(samples, prompt)
        try:
            self._send.send_nowait(request)
        except anyio.ClosedResourceError:
            await anyio.lowlevel.checkpoint()  # a caller that scores in a loop can be cancelled all the same
            return request.scores
        try:
            # Without a deadline: the queue is part of it, and the worker's own call has the time limit.
            with WAITS.register("reward", f"{self._function.name} for {self._function.subject(samples)}", math.inf):
                await request.done.wait()
        finally:
            request.abandoned = True
        return request.scores

    async def aclose(self) -> None:
        """Kills the workers; calls that still wait fail. Idempotent."""
        self._scope.cancel()
        if self._ended is not None:
            with (
                anyio.CancelScope(shield=True),
                waiting("end of the reward workers", self._function.name, 2 * _END_TIMEOUT_S),
            ):
                await self._ended.wait()

    async def _run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        assert self._ended is not None
        try:
            with self._scope:
                async with anyio.create_task_group() as workers:
                    async with anyio.create_task_group() as starting:
                        for index in range(self._size):
                            starting.start_soon(workers.start, self._serve, index)
                    task_status.started()
        except BaseExceptionGroup as group:
            raise _expected_error(group) from None
        finally:
            self._send.close()
            with suppress(anyio.EndOfStream):
                while True:
                    self._receive.receive_nowait().done.set()
            self._ended.set()

    async def _serve(self, index: int, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """One worker after the other, until the pool is closed."""
        generation = 0
        failed_starts = 0
        while True:
            name = f"{self._prefix}reward-worker-{index}.{generation}"
            try:
                async with self._worker(name) as connection:
                    if generation == 0:
                        task_status.started()
                    failed_starts = 0
                    while await self._serve_one(connection, name):
                        pass
            except RewardError as error:
                failed_starts += 1
                if generation == 0 or failed_starts == _STARTS:
                    raise
                log.warning("reward worker did not start; it is tried again", worker=name, reason=str(error))
                await anyio.sleep(_PAUSE_S * failed_starts)
            generation += 1
            self.replaced += 1

    async def _serve_one(self, connection: WorkerConnection, name: str) -> bool:
        """Takes one request from the queue and resolves it; False when the worker is of no more use."""
        request = await self._receive.receive()
        try:
            if request.abandoned:
                return True
            request.outcome, usable = await self._score_on(connection, name, request)
            return usable
        finally:
            request.done.set()

    async def _score_on(
        self, connection: WorkerConnection, name: str, request: _Request
    ) -> tuple[tuple[Score, ...] | str, bool]:
        """The scores or why the call failed, and whether the worker can go on."""
        samples = request.samples
        scored = self._function.subject(samples)
        try:
            number = connection.next_number()
            body = frame(call_of(number, samples, request.prompt))
        except (TypeError, ValueError, OverflowError) as error:
            return f"the sample cannot be sent to a reward worker: {error}", True
        try:
            with waiting("reward", f"{name} for {scored}", self._timeout_s):
                await connection.send(body)
                outcome = await connection.receive(ScoreOutcome)
                if (outcome.number, len(outcome.scores)) != (number, len(samples)):
                    raise Garbled(f"an answer to call {outcome.number} instead of {number}, or to other samples")
        except Garbled as error:
            log.warning("reward worker garbled its answer; replaced", scored=scored, worker=name, reason=str(error))
            return "the reward worker's answer was garbled: the function writes to its socket", False
        except TimeoutError:
            log.warning("reward timed out; worker replaced", scored=scored, worker=name)
            return f"the reward took longer than {self._timeout_s:g} s and was ended", False
        except WorkerDied:
            ended = await self._exit_of(name)
            if ended is None:
                log.warning("reward worker closed its socket; replaced", scored=scored, worker=name)
                return "the reward function closed its worker's socket, and the worker was ended", False
            log.warning("reward worker died; replaced", scored=scored, worker=name, returncode=ended.returncode)
            return f"the reward worker died (exit code {ended.returncode})", False
        return outcome.scores, True

    async def _exit_of(self, name: str) -> ProcessExit | None:
        """The exit of a worker whose socket has closed; None when it lives on, and `_worker` is to kill it."""
        with suppress(TimeoutError), waiting("exit", name, _EXIT_S):
            return await self._host.wait(name)
        return None

    @asynccontextmanager
    async def _worker(self, name: str) -> AsyncIterator[WorkerConnection]:
        """A connected process that has imported the function, killed on the way out. Raises RewardError."""
        socket_name = f"asyncrl-{name}-{secrets.token_hex(16)}"
        spec = ProcessSpec(
            name=name,
            argv=(sys.executable, "-m", "asyncrl.rollout.rewards.worker", socket_name),
            env={"OMP_NUM_THREADS": "1"},
            log_path=str(self._log_dir / f"{name.partition('.')[0]}.log"),
        )
        try:
            # Abstract: a path would have to fit in 107 characters, which a run directory or TMPDIR need not do.
            listening = await anyio.create_unix_listener(f"\0{socket_name}")
        except OSError as error:
            raise RewardError(f"{name}: no socket for it: {error}") from error
        async with listening as listener:
            try:
                await self._host.spawn(spec)
            except HostLostError:
                raise
            except EngineError as error:
                raise RewardError(f"{name} could not be spawned: {error}") from error
            try:
                try:
                    with waiting("start", name, _START_TIMEOUT_S):
                        stream = await self._accept(listener, name)
                except TimeoutError as error:
                    raise RewardError(f"reward.function: {error}; see {spec.log_path}") from error
                async with stream:
                    connection = WorkerConnection(stream)
                    await self._set_up(connection, spec)
                    yield connection
            finally:
                # A host that is gone has taken the worker with it; the next call of the host says so.
                with anyio.CancelScope(shield=True), waiting("exit", name, _END_TIMEOUT_S), suppress(EngineError):
                    await self._host.kill(name)

    async def _accept(self, listener: SocketListener, name: str) -> SocketStream:
        """The worker's connection; RewardError when its process ends instead."""
        accepted: list[SocketStream] = []
        ended: list[ProcessExit] = []

        async def watch() -> None:
            ended.append(await self._host.wait(name))
            race.cancel_scope.cancel()

        try:
            async with anyio.create_task_group() as race:
                race.start_soon(watch)
                while not accepted:
                    try:
                        stream = await listener.accept()
                    except anyio.BrokenResourceError as error:
                        raise RewardError(f"{name}: no socket for it: {error.__cause__}") from error
                    if is_ours(stream):
                        accepted.append(stream)
                    else:
                        await stream.aclose()
                race.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise _expected_error(group) from None
        if not accepted:
            raise RewardError(
                f"{name} ended before it could score (exit code {ended[0].returncode}):\n{ended[0].log_tail}"
            )
        return accepted[0]

    async def _set_up(self, connection: WorkerConnection, spec: ProcessSpec) -> None:
        function = self._function
        try:
            with waiting("import of the reward function", spec.name, _START_TIMEOUT_S):
                setup = Setup(
                    function.name,
                    dict(function.args),
                    function.scope,
                    function.directory,
                    sys.path,
                    declared_models(),
                )
                await connection.send(frame(setup))
                started = await connection.receive(Started)
        except TimeoutError as error:
            raise RewardError(f"reward.function: {error}; see {spec.log_path}") from error
        except Garbled as error:
            raise RewardError(f"reward.function: {function.name} writes to its worker's socket: {error}") from error
        except WorkerDied:
            ended = await self._exit_of(spec.name)
            if ended is None:
                raise RewardError(
                    f"reward.function: {function.name} closed the socket of the worker that imported it; "
                    f"see {spec.log_path}"
                ) from None
            raise RewardError(
                f"reward.function: {function.name} ended the worker that imported it (exit code {ended.returncode}):\n"
                f"{ended.log_tail}"
            ) from None
        if started.error is not None:
            raise RewardError(started.error)


def _expected_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first AsyncRLError inside, which names the cause; the group itself when there is none."""
    expected = group.subgroup(AsyncRLError)
    error: BaseException = group if expected is None else expected
    while expected is not None and isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
