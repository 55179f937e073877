"""The trackers that have a name. Each imports its package when it is made, in its own process.

A resumed run trains the steps after its checkpoint again. TensorBoard hides the former ones. The others cannot take a
row back (the rewind of wandb is a preview, and refuses a step metric), so each of their rows names its attempt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.data.dotted_path import resolve_dotted_path
from asyncrl.errors import ConfigError
from asyncrl.observability.trackers.sink import Sink, TrackedRun


class TensorBoardSink:
    """Writes event files to trackers/tensorboard: `tensorboard --logdir runs` finds those of all runs below `runs`."""

    def __init__(self, run: TrackedRun, *, flush_secs: float = 5.0) -> None:
        """`flush_secs`: longest time until a line is in the file."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._session, self._summary = Event, SessionLog, Summary
        self._resumed = run.attempt > 0
        self._writer = EventFileWriter(str(run.files / "tensorboard"), flush_secs=flush_secs)
        config = "```json\n" + json.dumps(run.config, indent=2, default=str) + "\n```"
        self._writer.add_event(Event(summary=text_pb("config", config)))

    def log(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        """One event with all metrics. The first of a resumed run takes back the steps that are trained again."""
        if self._resumed:
            self._resumed = False
            again = step if any(not name.startswith("eval/") for name in metrics) else step + 1
            self._writer.add_event(self._event(step=again, session_log=self._session(status=self._session.START)))
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(step=step, wall_time=time, summary=self._summary(value=values)))

    def finish(self) -> None:
        """Writes the rest."""
        self._writer.close()


class WandbSink:
    """A Weights & Biases run. With `mode = "offline"` or WANDB_MODE=offline its files are in trackers/wandb."""

    def __init__(self, run: TrackedRun, **args: Any) -> None:
        """`args`: of `wandb.init`."""
        import wandb

        defaults = {
            "project": run.project,
            "name": run.name,
            "id": run.identity,
            "resume": "allow",
            "dir": str(run.files),
            "config": dict(run.config),
            "settings": wandb.Settings(console="off"),
        }
        self._run = wandb.init(**defaults | args)
        self._attempt = run.attempt
        # A resumed run trains some steps again, and wandb refuses to go back in its own count of steps.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        """One row, with the step and the attempt as columns."""
        self._run.log({"step": step, "attempt": self._attempt, **metrics})

    def finish(self) -> None:
        """Sends the rest."""
        self._run.finish()


class TrackioSink:
    """A trackio run, in trackio's own directory (TRACKIO_DIR); `trackio show --project PROJECT` shows it."""

    def __init__(self, run: TrackedRun, **args: Any) -> None:
        """`args`: of `trackio.init`."""
        import trackio

        defaults = {
            "project": run.project,
            "name": f"{run.name}-{run.identity}",  # trackio knows a run by its name
            "config": dict(run.config),
            "resume": "allow",
            "embed": False,
        }
        self._run = trackio.init(**defaults | args)
        self._attempt = run.attempt

    def log(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        """One row, with the attempt as a column."""
        self._run.log({"attempt": self._attempt, **metrics}, step=step)

    def finish(self) -> None:
        """Writes the rest."""
        self._run.finish()


_NAMED: Mapping[str, Callable[..., Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "trackio": TrackioSink,
}


def open_sink(name: str, run: TrackedRun, args: Mapping[str, Any]) -> Sink:
    """Makes the sink of a name or dotted path. Raises ConfigError for a path that cannot be imported."""
    make = _NAMED.get(name) or resolve_dotted_path(name, setting="track.to", error=ConfigError)
    sink: Sink = make(run, **args)
    return sink
