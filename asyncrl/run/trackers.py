"""The processes of the sinks: starts them, tells when one fails, and ends them with the job.

Invariants
- Nothing here raises or waits on behalf of a sink while the job runs. What a sink cannot take is in metrics.jsonl.
- At the end of the job all sinks together have `run.stop_grace_s` to finish, a quarter of it after a signal.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from asyncrl.config.layout import DRIVER_NODE
from asyncrl.errors import EngineError
from asyncrl.host import Host, ProcessSpec
from asyncrl.observability.events import FaultSeen
from asyncrl.observability.report import METRICS_FILE
from asyncrl.observability.trackers.sink import end_mark, identity_of
from asyncrl.observability.waits import waiting
from asyncrl.run.job import Job
from asyncrl.tasks import run_all


async def start_trackers(job: Job, router_url: str | None) -> None:
    """Starts a process for each of `track.to`; returns while they boot."""
    if not job.config.track.to:
        return
    trackers = Trackers(job, job.hosts[DRIVER_NODE])
    try:
        await anyio.to_thread.run_sync(identity_of, job.directory.path)
    except OSError as error:
        job.record.note(f"nothing is tracked: {error}")
        return
    for sink in job.config.track.to:
        await trackers.start(sink, router_url)
    job.on_stop_now.append(trackers.hurry)
    job.disposal.push_async_callback(trackers.finish)


class Trackers:
    """The sinks of a job."""

    def __init__(self, job: Job, host: Host) -> None:
        self._job = job
        self._host = host
        self._grace_s = job.config.run.stop_grace_s
        self._names: list[str] = []
        self._ending = False

    async def start(self, sink: str, router_url: str | None) -> None:
        """Starts the process of one sink, and watches it."""
        name, directory = process_name(sink), self._job.directory
        argv = [sys.executable, "-m", "asyncrl.observability.trackers.follow", sink, str(directory.path)]
        argv += ["--attempt", str(directory.attempt), *([] if router_url is None else ["--router-url", router_url])]
        try:
            await self._host.spawn(ProcessSpec(name, tuple(argv), log_path=str(self._log(name))))
        except EngineError as error:
            self._tell(name, str(error))
            return
        self._names.append(name)
        self._job.task_group.start_soon(self._watch, name, name=name)

    async def hurry(self) -> None:
        """A signal ends the job: sinks have little time."""
        self._grace_s = self._job.config.run.stop_grace_s / 4

    async def finish(self) -> None:
        """No metrics follow: the sinks finish, all at once. Ends those that do not."""
        self._ending, end = True, end_mark(self._job.directory.path, self._job.directory.attempt)
        try:
            end.touch()
            with anyio.CancelScope(shield=True):  # the last figures of a job that fails are wanted most
                await run_all(*(partial(self._finish, name) for name in self._names))
            end.unlink()
        except (OSError, EngineError) as error:  # a full disk; the host has ended, and all sinks with it
            self._job.record.note(f"trackers may lack the last metrics, which {METRICS_FILE} has: {error}")

    async def _finish(self, name: str) -> None:
        try:
            with waiting("end of the metrics", name, self._grace_s):
                await self._host.wait(name)
            return
        except TimeoutError:
            await self._host.kill(name)
        what = f"did not take all metrics within {self._grace_s:g} s of the end"
        self._tell(name, f"{what}; {METRICS_FILE} has them ({self._log(name)})")

    async def _watch(self, name: str) -> None:
        """Tells where a sink fails."""
        try:
            ended = await self._host.wait(name)
        except EngineError:  # the host has ended, which others tell
            return
        if not ended.requested and (ended.returncode or not self._ending):
            why = f": {last[0].rstrip('.')}" if (last := ended.log_tail.strip().splitlines()[-1:]) else ""
            what = f"ended with {ended.returncode}{why}. The run goes on"
            self._tell(name, f"{what}; {METRICS_FILE} has all metrics ({self._log(name)})")

    def _log(self, name: str) -> Path:
        return self._job.directory.logs / f"{name}.log"

    def _tell(self, name: str, what: str) -> None:
        self._job.record.note(f"{name} {what}")
        self._job.events.emit(FaultSeen(component=name, what=what))


def process_name(sink: str) -> str:
    """`tracker-wandb`; for a dotted path `tracker-package.module.Class`."""
    return "tracker-" + sink.replace(":", ".")
