"""Trackers that a configuration names: whether they are known, installed, and given arguments that they may get."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping

from asyncrl.config.checks.named_code import function_problems
from asyncrl.config.problems import Problem
from asyncrl.config.reading.redaction import is_secret
from asyncrl.config.sections.shown import TrackConfig

TRACKERS = ("tensorboard", "wandb", "trackio")
"""Trackers that have a name, which is also that of the pip package that each needs."""


def tracker_problems(track: TrackConfig) -> Iterator[Problem]:
    """What is wrong with `track`."""
    for tracker in track.to:
        if ":" in tracker:
            yield from function_problems("track.to", tracker)
        elif tracker not in TRACKERS:
            yield Problem(
                "track.to", f"{tracker} is none of {', '.join(TRACKERS)}, nor of the form package.module:Class"
            )
        elif not is_installed(tracker):
            yield Problem(
                "track.to",
                f"{tracker} is not installed; run pip install {tracker}, or pip install 'asyncrl[trackers]' for all",
            )
    if len(set(track.to)) < len(track.to):
        yield Problem("track.to", "names a tracker twice")
    for tracker, args in track.args.items():
        if tracker not in track.to:
            yield Problem("track.args", f"{tracker} is not in track.to ({', '.join(track.to) or 'which is empty'})")
        elif not isinstance(args, Mapping):
            yield Problem("track.args", f'{tracker} needs a table of arguments, as in {{wandb = {{mode = "offline"}}}}')
        elif (secret := next((key for key in args if is_secret(key)), None)) is not None:
            yield Problem(
                "track.args",
                f"{tracker}.{secret} is a secret, which no file of a run holds; set it in the environment",
            )


def is_installed(package: str) -> bool:
    """Whether a package can be imported. A folder of that name, as `wandb` leaves one, is no package."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
