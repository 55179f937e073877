"""Runs the keepers of one group, and remembers why the group cannot serve any more.

Invariants
- The first EngineError that a keeper's task raises is the group's failure; `check` raises it to all who ask.
- The failure of an essential group is raised into the task group, which ends the job. Another group's is only logged.
- Once the end has begun (`begin_end`), no error of a keeper is a failure.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import structlog
from anyio.abc import TaskGroup

from asyncrl.errors import EngineError

_log = structlog.get_logger(__name__)


class Supervision:
    """The tasks of one group and their failure."""

    def __init__(self, model: str, task_group: TaskGroup, *, essential: bool, on_failure: Callable[[], None]) -> None:
        """`model` names the group; `on_failure` is called when the group has failed."""
        self.ending = False
        """Whether the group is to end."""
        self._model = model
        self._task_group = task_group
        self._essential = essential
        self._on_failure = on_failure
        self._failure: EngineError | None = None
        self._scopes: set[anyio.CancelScope] = set()

    @property
    def failed(self) -> bool:
        """Whether the group cannot serve any more."""
        return self._failure is not None

    def check(self) -> None:
        """Raises EngineError once the group cannot serve any more."""
        if self._failure is not None:
            raise self._failure
        if self.ending:
            raise EngineError("the fleet has been disposed of")

    def forget_failure(self) -> None:
        """Lets a group that has failed begin anew."""
        self._failure = None

    def start(self, run: Callable[[], Awaitable[None]], name: str) -> None:
        """Starts a keeper's task, called `name`."""
        self._task_group.start_soon(self._watched, run, name=name)

    def begin_end(self) -> None:
        """The group is to end: nothing that a keeper raises is a failure from now on."""
        self.ending = True

    def cancel(self) -> None:
        """Cancels the tasks that still run."""
        for scope in tuple(self._scopes):
            scope.cancel()

    async def _watched(self, run: Callable[[], Awaitable[None]]) -> None:
        failure: BaseException | None = None
        scope = anyio.CancelScope()
        self._scopes.add(scope)
        try:
            with scope:
                await run()
        except* EngineError as group:  # also the host's own: it is gone, and the processes with it
            failure = group
        finally:
            self._scopes.discard(scope)
        while isinstance(failure, BaseExceptionGroup):
            failure = failure.exceptions[0]
        if isinstance(failure, EngineError) and not self.ending:
            self._failure = self._failure or failure
            self._on_failure()
            if self._essential:
                raise failure
            _log.error("a model is served no more; the job goes on", model=self._model, reason=str(failure))
