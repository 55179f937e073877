"""Tasks: waking the tasks that wait for a change, getting results and errors out of several tasks, and naming tasks.

Invariants
- A task that waits for a change can be cancelled, also while changes arrive in every turn of the event loop.
- An error of one of several tasks is raised as it is, never inside an exception group.
- A background task is listed from its start to its end.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

T = TypeVar("T")

Call = Callable[[], Awaitable[T]]

MAY_NOT_RETURN = "may not return: "
"""Begins the name of a thread whose present call into a library may never return. Once all is disposed of, a process in
which such a thread is left ends at once: the end of the interpreter could abort it."""


class Changes:
    """Wakes waiting tasks whenever some state has changed; they look at the state themselves.

        while not ready():              # the task that waits
            await changes.wait()

        state = ...                     # whoever changes the state
        changes.notify()

    A change that nobody waits for is not remembered. So look at the state before each wait, in the task that waits: a
    change between the look and the start of another task is lost.
    """

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next: anyio.Event | None = None
        """Set by the next change; None while no task waits, so that a change which nobody awaits costs nothing."""

    def notify(self) -> None:
        """Wakes every task that waits now."""
        if self._next is not None:
            changed, self._next = self._next, None
            changed.set()

    async def wait(self) -> None:
        """Returns at the next `notify`."""
        # anyio cancels a task in the midst of a wait. One that is woken in every turn would never be found in one.
        await anyio.lowlevel.checkpoint_if_cancelled()
        if self._next is None:
            self._next = anyio.Event()
        await self._next.wait()


async def run_all(*calls: Call[T]) -> list[T]:
    """Runs all calls at once and returns their results in order; the first error cancels the others and is raised."""
    results: dict[int, T] = {}
    errors: list[Exception] = []

    async def run(index: int, call: Call[T]) -> None:
        try:
            results[index] = await call()
        except Exception as error:  # of any kind: raised below, outside the task group, which would wrap it
            errors.append(error)
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for index, call in enumerate(calls):
            tasks.start_soon(run, index, call)
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(calls))]


async def finish_all(*calls: Call[object]) -> None:
    """Runs all calls to their end, even when some fail; raises the first error after that."""
    errors: list[Exception] = []

    async def finish(call: Call[object]) -> None:
        try:
            await call()
        except Exception as error:  # of any kind: raised once the others have ended
            errors.append(error)

    async with anyio.create_task_group() as tasks:
        for call in calls:
            tasks.start_soon(finish, call)
    if errors:
        raise errors[0]


async def first_of(*waits: Call[object]) -> None:
    """Returns when the first wait returns, and cancels the others; the first error is raised."""
    errors: list[Exception] = []

    async def wait_for(wait: Call[object]) -> None:
        try:
            await wait()
        except Exception as error:  # of any kind: raised below, outside the task group, which would wrap it
            errors.append(error)
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for wait in waits:
            tasks.start_soon(wait_for, wait)
    if errors:
        raise errors[0]


@dataclass(frozen=True, slots=True)
class RunningTask:
    """A background task that has not ended."""

    name: str
    seconds: float
    """Since its start."""


class BackgroundTask:
    """One task of a `Background`. The owner of its work ends it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.started = time.monotonic()
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()

    async def end(self) -> None:
        """Cancels the task and returns once it has ended, also where the caller is cancelled. Idempotent.

        What the task itself shields from cancellation goes on to its end, so its owner keeps that short.
        """
        self._scope.cancel()
        with anyio.CancelScope(shield=True):
            await self._ended.wait()

    async def wait(self) -> None:
        """Returns once the task has ended by itself, or was ended."""
        await self._ended.wait()

    async def _run(self, work: Call[object]) -> None:
        try:
            with self._scope:
                await work()
        finally:
            self._ended.set()


class Background:
    """The work of a job that goes on beside its loop: tasks with names, all in one task group.

    An error that `work` raises ends the task group, and so the job.
    """

    def __init__(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self._running: dict[BackgroundTask, None] = {}

    def start(self, name: str, work: Call[object]) -> BackgroundTask:
        """Begins `work` in a task of its own, which is listed as `name`."""
        task = BackgroundTask(name)
        self._running[task] = None
        self._tasks.start_soon(self._list, task, work, name=name)
        return task

    @property
    def running(self) -> tuple[RunningTask, ...]:
        """The tasks that have not ended, in the order in which they began."""
        now = time.monotonic()
        return tuple(RunningTask(task.name, now - task.started) for task in self._running)

    async def _list(self, task: BackgroundTask, work: Call[object]) -> None:
        try:
            await task._run(work)
        finally:
            del self._running[task]
