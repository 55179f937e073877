"""Code that a configuration names: read and judged before anything starts, without importing it."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.checks.named_code import function_problems, reward_problems
from asyncrl.config.checks.reward_signature import signature_problems
from asyncrl.config.checks.user_code import read_named
from asyncrl.config.sections.rollout import RewardConfig
from asyncrl.errors import RewardError
from asyncrl.rollout.rewards.registry import resolve_reward

MODULE = """
import os
from math import sqrt as root
raise SystemExit("never to be executed")

LIMIT: int = 3
scores = {"a": 1}
for name in ("x",):
    in_loop = name
try:
    from other import *
except ImportError:
    fallback = None
    def guarded(sample, prompt): ...
else:
    pass

def score(sample, prompt, *, bonus=0.0): ...
async def later(sample, prompt, /, weight, *, bonus=0.0, **more): ...
@root
def decorated(sample, prompt): ...
class Judge:
    def __call__(self, sample, prompt): ...
"""


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with code of a user, which is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "code_of_mine.py").write_text(
        MODULE.replace("    from other import *\n", "    from other import one\n")
    )
    (tmp_path / "stars.py").write_text("from os.path import *\n")
    (tmp_path / "made.py").write_text("globals()['f'] = print\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    package = tmp_path / "package_of_mine"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("1 / 0\n")
    (package / "rewards.py").write_text("def score(sample, prompt): ...\n")
    (package / "deep" / "more.py").write_text("def score(sample, prompt): ...\n")  # a namespace package
    return tmp_path


def problem(path: str) -> str | None:
    return next((str(p) for p in function_problems("reward.function", path)), None)


@pytest.mark.parametrize(
    "path",
    [
        *(f"code_of_mine:{n}" for n in ("score", "later", "decorated", "Judge", "Judge.__call__", "os", "root", "one")),
        *(f"code_of_mine:{n}" for n in ("LIMIT", "scores", "in_loop", "guarded", "fallback")),
        "stars:join",
        "made:f",
        "broken:f",
        "package_of_mine.rewards:score",
        "package_of_mine.deep.more:score",
        "asyncrl.data.dotted_path:resolve_dotted_path",
        "json:loads",
        "math:sqrt",
    ],
)
def test_whatever_may_exist_passes_and_nothing_is_executed(beside: Path, path: str) -> None:
    assert problem(path) is None
    assert not {"code_of_mine", "package_of_mine", "made"} & set(sys.modules)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("code_of_mine:scor", "'code_of_mine' has no 'scor'; did you mean code_of_mine:score"),
        ("code_of_mine:nothing_alike", "'code_of_mine' has no 'nothing_alike'"),
        ("code_of_mime:score", "there is no module 'code_of_mime' (looked in .*); did you mean code_of_mine?"),
        ("package_of_mine.reward:score", "package 'package_of_mine' has no module 'reward'; did you mean rewards?"),
        ("package_of_mine.rewards.x:score", "'package_of_mine.rewards' is a module, not a package"),
    ],
)
def test_what_cannot_exist_is_told_with_what_was_meant(beside: Path, path: str, message: str) -> None:
    told = problem(path)
    assert told is not None and told.startswith("reward.function: ")
    start, _, end = message.partition(".*")
    assert start in told and end in told


def test_a_signature_that_was_read_is_that_of_the_function(beside: Path) -> None:
    (beside / "same.py").write_text(MODULE[MODULE.index("def score") : MODULE.index("@root")])
    for name in ("score", "later"):
        read = read_named(f"same:{name}").signature
        true = inspect.signature(resolve_reward(f"same:{name}", {"weight": 1} if name == "later" else {}).function)
        assert read is not None
        assert [(p.name, p.kind, p.default is p.empty) for p in read.parameters.values()] == [
            (p.name, p.kind, p.default is p.empty) for p in true.parameters.values()
        ]
    assert read_named("code_of_mine:decorated").signature is None
    sys.modules.pop("same")


# how a reward is called

FOREIGN = [
    ("(args, sample, **kwargs)", "slime and miles call a reward", "sample.text"),
    ("(completions, answer, **kwargs)", "TRL and verifiers call a reward", "prompt.answer"),
    ("(completions, **kwargs)", "TRL and verifiers call a reward", "prompt.record"),
    ("(prompts, completions, answer)", "TRL and verifiers call a reward", 'reward.scope = "group"'),
    ("(prompt, completion, answer, state)", "TRL and verifiers call a reward", "sample.text"),
    (
        "(data_source, solution_str, ground_truth, extra_info=None)",
        "verl calls a reward",
        "solution_str is sample.text",
    ),
    ("(solution_str, ground_truth)", "verl calls a reward", "ground_truth is prompt.answer"),
    ("(queries, prompts, labels)", "OpenRLHF calls a reward", "prompt.text + sample.text"),
    ("(sample, answer)", "its second parameter is `answer`", "prompt.answer"),
    ("(prompt, sample)", "its first parameter is `prompt`", "prompt.answer"),
    ("(response, prompt)", "its first parameter is `response`", "sample.text"),
]


@pytest.mark.parametrize("scope", ["sample", "group"])
@pytest.mark.parametrize(("parameters", "whose", "instead"), FOREIGN)
def test_a_reward_of_another_framework_is_refused_with_what_to_write(
    beside: Path, parameters: str, whose: str, instead: str, scope: Any
) -> None:
    (beside / "foreign_reward.py").write_text(f"def score{parameters}:\n    return 1.0\n")
    config = RewardConfig(function="foreign_reward:score", scope=scope)
    (told,) = map(str, reward_problems(config))
    assert told.startswith("reward.function: foreign_reward:score") and whose in told and instead in told
    assert f"`def score({'samples' if scope == 'group' else 'sample'}, prompt)`" in told
    with pytest.raises(RewardError) as error:  # also where the source does not show it
        resolve_reward("foreign_reward:score", {}, scope)
    assert str(error.value) == told
    sys.modules.pop("foreign_reward")


NAMES = st.sampled_from(["s", "p", "x", "item", "rollout", "task", "self_", "_", "sample", "prompt", "record"])


@given(NAMES, NAMES, st.sets(st.sampled_from(["bonus", "weight", "answer", "label", "ground_truth", "completion"])))
def test_our_own_names_and_names_that_say_nothing_pass_with_any_further_arguments(
    first: str, second: str, more: set[str]
) -> None:
    if first in (second, "prompt") or second == "sample":
        return
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in (first, second)]
    parameters += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in sorted(more)]
    signature = inspect.Signature(parameters)
    assert list(signature_problems("m:f", signature, dict.fromkeys(more, 1), "sample")) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"args": {"bonsu": 1}},
            (
                "reward.args.bonsu: code_of_mine:score is called as (sample, prompt, **args), and it takes bonus; did "
                "you mean bonus?"
            ),
        ),
        (
            {"scope": "group"},
            (
                "reward.scope: code_of_mine:score is called as (samples, prompt, **args), and its first parameter is "
                '`sample`; set reward.scope = "sample"'
            ),
        ),
        (
            {"function": "code_of_mine:later"},
            (
                "reward.args: code_of_mine:later is called as (sample, prompt, **args), which it does not take: "
                "missing a required argument: 'weight'"
            ),
        ),
    ],
)
def test_arguments_and_scope_are_held_against_the_source_before_anything_starts(
    beside: Path, settings: dict[str, Any], message: str
) -> None:
    (told,) = map(str, reward_problems(RewardConfig(**{"function": "code_of_mine:score", **settings})))
    assert message in told


@pytest.mark.parametrize(("parameters", "scope"), [("sample", "sample"), ("", "sample"), ("samples", "group")])
def test_a_reward_that_takes_fewer_arguments_is_told_what_to_write(
    beside: Path, parameters: str, scope: Literal["sample", "group"]
) -> None:
    (beside / "same.py").write_text(f"def short({parameters}): ...\n")
    (told,) = map(str, reward_problems(RewardConfig(function="same:short", scope=scope)))
    called_with = f"({'samples' if scope == 'group' else 'sample'}, prompt)"
    assert told.startswith(f"reward.function: same:short takes ({parameters}), but is called with {called_with}")
    assert told.endswith(f"Write `def short{called_with}`")
