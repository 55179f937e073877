"""Code that a configuration names: algorithms, rewards, filters, generated tasks, functions of the user's own.

Invariants
- Nothing named is imported here. A name that is refused here could not be imported later. A name that passes may still
  fail to import.
- The tables of built-in rewards, filters and algorithms equal those of `rollout/` and `algorithms/`. Tests compare
  them.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from asyncrl.config.checks.reward_signature import signature_problems
from asyncrl.config.checks.user_code import read_named
from asyncrl.config.nearest import did_you_mean, nearest
from asyncrl.config.problems import Problem
from asyncrl.config.reading.redaction import shown
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.rollout import RewardConfig
from asyncrl.config.sections.training import TrainConfig

TASKS = "reasoning_gym:"
"""The beginning of a `source` that reasoning-gym generates."""

_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_REGISTERED = re.compile(r'^register_dataset\(\s*(?:"([^"]+)"|(\w+))', re.MULTILINE)
_IN_WORDS: Mapping[type, str] = {bool: "true or false", str: "text", float: "a number over 0"}


@dataclass(frozen=True, slots=True)
class BuiltinReward:
    """A reward function of the project's own."""

    args: Mapping[str, type] = field(default_factory=dict)
    """Arguments that [reward.args] may hold → their types."""
    needs: str | None = None
    """The argument that it requires."""


BUILTIN_REWARDS: Mapping[str, BuiltinReward] = {
    "exact_match": BuiltinReward({"strip": bool, "ignore_case": bool}),
    "length": BuiltinReward({"target": float}, needs="target"),
    "math_verify": BuiltinReward(),
    "reasoning_gym": BuiltinReward({"task": str, "answer_tag": str}),
}


@dataclass(frozen=True, slots=True)
class BuiltinAlgorithm:
    """An algorithm of the project's own."""

    group_samples: int = 1
    """The fewest samples of a prompt that it can use."""
    settings: frozenset[str] = frozenset()
    """Names in the section `algorithm` that it has."""


_OF_ALL = frozenset(
    {
        *("aggregation", "entropy_bonus", "truncated_weight", "overlong_tokens", "overlong_penalty"),
        *("kl", "kl_coefficient", "kl_estimator", "reference", "reference_interval", "teacher", "teacher_weight"),
        *(
            "advantage_function",
            "loss_function",
            "old_logprobs",
            "correction",
            "correction_level",
            "correction_upper",
            "correction_lower",
        ),
    }
)
_CLIPPED = _OF_ALL | {"clip_low", "clip_high", "dual_clip"}
_OF_GROUPS = BuiltinAlgorithm(2, _CLIPPED | {"normalize_advantages"})

BUILTIN_ALGORITHMS: Mapping[str, BuiltinAlgorithm] = {
    "grpo": _OF_GROUPS,
    "dr_grpo": _OF_GROUPS,
    "dapo": _OF_GROUPS,
    "gspo": _OF_GROUPS,
    "gspo_token": _OF_GROUPS,
    "cispo": BuiltinAlgorithm(2, _OF_ALL | {"normalize_advantages", "ratio_max"}),
    "distill": BuiltinAlgorithm(1, _CLIPPED),
    "rloo": BuiltinAlgorithm(2, _CLIPPED),
    "reinforce_pp": BuiltinAlgorithm(1, _CLIPPED),
    "reinforce_pp_baseline": BuiltinAlgorithm(2, _CLIPPED),
    "sft": BuiltinAlgorithm(),
}
"""The project's own algorithms."""

BUILTIN_FILTERS = ("zero_variance",)
"""The project's own group filters."""


def is_generated(source: str) -> bool:
    """Whether a `source` names code that makes the prompts, not a path."""
    return source.startswith(TASKS) or (":" in source and "/" not in source)


def source_problems(key: str, source: str) -> Iterator[Problem]:
    """What is wrong with a task or a function that the setting `key` names as its source."""
    if source.startswith(TASKS):
        yield from _task_problems(key, source.removeprefix(TASKS))
    elif is_generated(source):
        yield from function_problems(key, source)


def filter_problems(filters: Sequence[str]) -> Iterator[Problem]:
    """What is wrong with the names of group filters."""
    for name in filters:
        if ":" in name:
            yield from function_problems("rollout.filters", name)
        elif name not in BUILTIN_FILTERS:
            known = f"; known are {', '.join(BUILTIN_FILTERS)}, and any package.module:function"
            hint = did_you_mean(nearest(name, BUILTIN_FILTERS)) or known
            yield Problem("rollout.filters", f"there is no filter {name!r}{hint}")


def algorithm_problems(train: TrainConfig, given: AlgorithmConfig) -> Iterator[Problem]:
    """What is wrong with the name of the algorithm, with its arguments, and with the settings that it is given."""
    name = train.algorithm
    if ":" in name:
        yield from function_problems("train.algorithm", name)
    elif name not in BUILTIN_ALGORITHMS:
        known = f"; known are {', '.join(BUILTIN_ALGORITHMS)}, and any package.module:Name"
        hint = did_you_mean(nearest(name, BUILTIN_ALGORITHMS)) or known
        yield Problem("train.algorithm", f"there is no algorithm {name!r}{hint}")
    else:
        if train.algorithm_args:
            where = f"the settings of {name} are those of [algorithm]"
            yield Problem("train.algorithm_args", f"are for an algorithm of your own; {where}")
        has = BUILTIN_ALGORITHMS[name].settings
        told = ", ".join(sorted(has)) or "none"
        for key in sorted(given.changed() - has):
            yield Problem(f"algorithm.{key}", f"{name} has no such setting; it has {told}")
    for key in ("advantage_function", "loss_function"):
        if (function := getattr(given, key)) is not None:
            yield from function_problems(f"algorithm.{key}", function)
    for key in ("reference", "teacher"):
        path = getattr(given, key)
        if path is not None and not (path / "config.json").is_file():
            yield Problem(f"algorithm.{key}", f"{path} is no Hugging Face model directory (looked in {Path.cwd()})")
    if given.teacher is None and ":" not in name and (given.teacher_weight or name == "distill"):
        yield Problem("algorithm.teacher", "is not set; give the directory of the model to learn from")
    if name == "distill" and given.teacher_weight == 0:
        yield Problem("algorithm.teacher_weight", "0 leaves distill nothing to learn from; leave it out")
    if given.correction_lower > given.correction_upper:
        yield Problem(
            "algorithm.correction_lower",
            f"{given.correction_lower:g} is over algorithm.correction_upper = {given.correction_upper:g}",
        )
    if given.correction != "off" and given.old_logprobs == "engine":
        yield Problem(
            "algorithm.old_logprobs", "a correction compares with the trainer's log-probs; leave it out, or set trainer"
        )
    if given.correction == "auto" and given.old_logprobs == "trainer":
        yield Problem("algorithm.old_logprobs", "correction = auto decides when log-probs are computed; leave it out")


def reward_problems(reward: RewardConfig) -> Iterator[Problem]:
    """What is wrong with the name of the reward, with its parameters, and with the arguments that it gets."""
    name = reward.function
    if ":" in name:
        broken = list(function_problems("reward.function", name))
        signature = None if broken else read_named(name).signature
        if signature is not None:
            broken = list(signature_problems(name, signature, reward.args, reward.scope))
        yield from broken
        return
    builtin = BUILTIN_REWARDS.get(name)
    if builtin is None:
        module, _, attribute = name.rpartition(".")
        meant = (f"{module}:{attribute}",) if module else nearest(name, BUILTIN_REWARDS)
        known = f"; known are {', '.join(BUILTIN_REWARDS)}, and any package.module:function"
        yield Problem("reward.function", f"there is no reward {name!r}{did_you_mean(meant) or known}")
        return
    if reward.scope != "sample":
        yield Problem("reward.scope", f"{name} scores one sample at a time; only a function of your own scores groups")
    for given, value in reward.args.items():
        key, kind = f"reward.args.{given}", builtin.args.get(given)
        if kind is None:
            takes = ", ".join(builtin.args) or "no arguments"
            yield Problem(key, f"{name} takes {takes}{did_you_mean(nearest(given, builtin.args))}")
        elif not _fits(value, kind):
            yield Problem(key, f"{shown(given, value)} is not allowed; {name} expects {_IN_WORDS[kind]}")
        elif given == "task" and isinstance(value, str):
            yield from _task_problems(key, value)
    if builtin.needs is not None and builtin.needs not in reward.args:
        option = f"--reward.args.{builtin.needs}"
        yield Problem("reward.args", f"{name} needs {builtin.needs}; set {option} VALUE")


def function_problems(key: str, path: str) -> Iterator[Problem]:
    """What is wrong with `package.module:function`, as far as that shows without importing it."""
    module, _, function = path.partition(":")
    if not _DOTTED.fullmatch(module) or not _DOTTED.fullmatch(function):
        yield Problem(key, f"{path!r} is not of the form package.module:function")
    elif (problem := read_named(path).problem) is not None:
        yield Problem(key, problem)


def _fits(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    return isinstance(value, kind)


def _task_problems(key: str, task: str) -> Iterator[Problem]:
    known = reasoning_gym_tasks()
    if known and task not in known:
        hint = did_you_mean(nearest(task, known)) if task else f"; write {TASKS}TASK, for example {TASKS}chain_sum"
        yield Problem(key, f"reasoning_gym has no task {task!r}{hint}")


@cache
def reasoning_gym_tasks() -> frozenset[str]:
    """Names of reasoning-gym's tasks; empty where it is not installed. Read from its source: importing takes 2 s."""
    spec = importlib.util.find_spec("reasoning_gym")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    names: set[str] = set()
    for path in Path(spec.submodule_search_locations[0]).rglob("*.py"):
        text = path.read_text(encoding="utf-8", errors="replace")
        for literal, constant in _REGISTERED.findall(text):
            assigned = re.search(rf'^{constant}\s*=\s*["\']([^"\']+)', text, re.MULTILINE) if constant else None
            names |= {literal} if literal else {assigned[1]} if assigned else set()
    return frozenset(names)
