"""The job: what the parts of one running job share. Its configuration, its directory, its account, its processes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from anyio.abc import TaskGroup

from asyncrl.config import Config
from asyncrl.config.layout import ProcessLayout
from asyncrl.exit_protocol import StopRequest
from asyncrl.host import Hosts
from asyncrl.observability.events import EventLog
from asyncrl.run.pauses import Pauses
from asyncrl.run.recorder import Recorder
from asyncrl.run.turns import Turns
from asyncrl.run_directory import RunDirectory
from asyncrl.tasks import Background


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One attempt of a run, as its loop sees it on rank 0."""

    config: Config
    """`run.dir` is the directory that was really taken."""
    layout: ProcessLayout
    directory: RunDirectory
    events: EventLog
    record: Recorder
    hosts: Hosts
    """By node, the owner of the job's processes there."""
    stop: StopRequest
    """Set when the job was asked to leave after the step in progress."""
    task_group: TaskGroup
    """Where supervisors live; a failure there cancels the loop."""
    background: Background
    """Work beside the loop that has a name; its tasks live in `task_group`."""
    pauses: Pauses
    """Tells executors when the engines generate nothing."""
    turns: Turns
    """Whose turn it is on GPUs that engines share with the trainer."""
    disposal: AsyncExitStack
    """What was built is given back in reverse order, whatever happened."""
    on_stop_now: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    """Called when a signal has ended the loop, before anything is given back; all within `run.checkpoint_grace_s`."""
