"""Settings that change nothing beside the other ones. Pure.

They are no mistake that could fail later, so they are told and not refused. The settings of a whole part that is off
(`warmup` without steps) are not told: a recipe may keep them for another day.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from asyncrl.config.checks.named_code import is_generated
from asyncrl.config.checks.staleness import least_staleness
from asyncrl.config.root import Config
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.data import DataConfig


def settings_without_effect(config: Config) -> Iterator[str]:
    """One sentence for each setting that is given and has no effect."""
    yield from _of_source("data", config.data)
    if config.eval.data is not None:
        yield from _of_source("eval.data", config.eval.data)
    if config.warmup.steps and config.warmup.args and not is_generated(config.warmup.source):
        yield _args_of_file("warmup", config.warmup.source)
    if ":" not in config.train.algorithm:
        yield from _of_algorithm(config.train.algorithm, config.algorithm)


def unused_staleness(config: Config) -> str | None:
    """What to say of `rollout.max_staleness` in a loop that generates nothing ahead; None where it is not given."""
    asked, least = config.rollout.max_staleness, least_staleness(config)
    if asked is None or asked <= least:
        return None
    return (
        f"rollout.max_staleness = {asked} has no effect in this loop, which generates nothing ahead: samples are at "
        f"most {least} steps stale; entrypoints/train_async.py uses it"
    )


def _of_algorithm(name: str, given: AlgorithmConfig) -> Iterator[str]:
    changed = given.changed()
    needed = {
        "kl": ("kl_coefficient", "kl_estimator", "reference", "reference_interval")
        if given.kl in (None, "off")
        else (),
        "correction": ("correction_level", "correction_upper", "correction_lower") if given.correction == "off" else (),
        "overlong_tokens": () if given.overlong_tokens else ("overlong_penalty",),
        "teacher_weight": () if given.teacher_weight or name == "distill" else ("teacher",),
    }
    for switch, settings in needed.items():
        for key in sorted(changed.intersection(settings)):
            yield f"algorithm.{key} has no effect: algorithm.{switch} is not set"
    if name == "distill":
        for key in ("overlong_tokens", "overlong_penalty") + (("kl",) if given.kl == "reward" else ()):
            if key in changed:
                yield f"algorithm.{key} has no effect: distill reads no rewards"


def _of_source(key: str, data: DataConfig) -> Iterator[str]:
    generated = is_generated(data.source)
    if data.split is not None and (generated or Path(data.source).is_file()):
        what = "makes its records" if generated else "is one file"
        yield f"{key}.split has no effect: {data.source} {what}; only a directory has splits"
    if data.args and data.source and not generated:
        yield _args_of_file(key, data.source)
    if data.answer_after is not None and data.answer_key is None:
        yield f"{key}.answer_after has no effect: {key}.answer_key is none, so there are no answers"


def _args_of_file(key: str, source: str) -> str:
    return f"{key}.args has no effect: {source} is no generated task and no function"
