"""Whether a reward function can be called as this program calls rewards, by the names of its parameters. Pure.

A reward is called with two arguments, `(sample, prompt, **reward.args)`, or `(samples, prompt, **reward.args)` with
reward.scope = group. A function that takes two arguments of other meanings would be called all the same, and train on a
constant. So the names of its parameters are looked at: those by which other frameworks call rewards are refused, with
what to write instead. Names that say nothing (`s`, `item`) pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.config.nearest import did_you_mean, nearest
from asyncrl.config.problems import Problem
from asyncrl.config.sections.rollout import RewardScope

_SCORES: Mapping[str, RewardScope] = {"sample": "sample", "samples": "group", "group": "group"}
"""What a function scores whose first parameter has such a name."""


@dataclass(frozen=True, slots=True)
class _Framework:
    """How another framework calls rewards."""

    name: str
    marks: frozenset[str]
    """Names of parameters by which its rewards are known."""
    instead: str
    """What to write here."""


_FRAMEWORKS = (
    _Framework(
        "verl",
        frozenset({"data_source", "solution_str", "ground_truth", "extra_info", "solution_strs", "ground_truths"}),
        "solution_str is sample.text, ground_truth is prompt.answer, and data_source and extra_info are fields of "
        "prompt.record",
    ),
    _Framework(
        "OpenRLHF",
        frozenset({"queries", "labels"}),
        "a query is prompt.text + sample.text, and its label is prompt.answer",
    ),
    _Framework(
        "TRL and verifiers",
        frozenset({"completions", "completion", "completion_ids", "prompts", "state"}),
        "a completion is sample.text, and columns of the data are fields of prompt.record (the answer is "
        "prompt.answer); a function that compares the samples of a prompt takes (samples, prompt), with "
        'reward.scope = "group"',
    ),
    _Framework(
        "slime and miles",
        frozenset({"args"}),
        "the first argument is the sample: its response is sample.text, its label prompt.answer, its metadata "
        "prompt.record; what args held comes by name from [reward.args]",
    ),
)
_NO_SAMPLE = frozenset({"response", "responses", "text", "texts", "output", "outputs", "answer", "prompt", "question"})
"""Names of a first parameter that is no sample."""
_NO_PROMPT = frozenset(
    {"answer", "answers", "label", "target", "gold", "reference", "solution", "response", "sample", "samples"}
)
"""Names of a second parameter that is no prompt."""


def signature_problems(
    name: str, signature: inspect.Signature, args: Mapping[str, Any], scope: RewardScope
) -> Iterator[Problem]:
    """What is wrong with the parameters of reward `name` under these settings."""
    called_with = f"({'samples' if scope == 'group' else 'sample'}, prompt)"
    parameters = list(signature.parameters.values())
    first, second = ([p.name for p in parameters if p.kind in _BY_PLACE] + ["", ""])[:2]
    meant = _SCORES.get(first)
    if foreign := _foreign(parameters, first, second):
        yield Problem(
            "reward.function",
            f"{name} has the parameters {signature}, as {foreign.name} call{'' if ' and ' in foreign.name else 's'} a "
            f"reward; here it is called with {called_with}. Write `def {name.rpartition(':')[2]}{called_with}`: "
            f"{foreign.instead}",
        )
    elif first in _NO_SAMPLE or second in _NO_PROMPT:
        what = f"its first parameter is `{first}`" if first in _NO_SAMPLE else f"its second parameter is `{second}`"
        yield Problem(
            "reward.function",
            f"{name} is called with {called_with}, and {what}. Write `def {name.rpartition(':')[2]}{called_with}`: the "
            "response is sample.text, and the reference answer prompt.answer (rename the parameter if it is meant so)",
        )
    elif meant is not None and meant != scope:
        yield Problem(
            "reward.scope",
            f"{name} is called as {called_with[:-1]}, **args), and its first parameter is `{first}`; set "
            f'reward.scope = "{meant}", or rename the parameter',
        )
    else:
        yield from _argument_problems(name, signature, args, called_with)


_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _foreign(parameters: list[inspect.Parameter], first: str, second: str) -> _Framework | None:
    """The framework for which the function was written, if its first two parameters are not ours."""
    if first in _SCORES and second not in _NO_PROMPT and not any(second in f.marks for f in _FRAMEWORKS):
        return None
    names = {parameter.name for parameter in parameters if parameter.kind in _BY_PLACE}
    if first == "prompt":  # of TRL's and verifiers' rewards by keyword
        names |= {parameter.name for parameter in parameters}
    return next((framework for framework in _FRAMEWORKS if names & framework.marks), None)


def _argument_problems(
    name: str, signature: inspect.Signature, args: Mapping[str, Any], called_with: str
) -> Iterator[Problem]:
    parameters = signature.parameters
    called_as = f"{called_with[:-1]}, **args)"
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        takes = [p.name for p in list(parameters.values())[2:] if p.kind is not inspect.Parameter.VAR_POSITIONAL]
        unknown = [given for given in args if given not in takes]
        for given in unknown:
            offered = f"it takes {', '.join(takes) or 'no arguments'}"
            hint = did_you_mean(nearest(given, takes))
            yield Problem(f"reward.args.{given}", f"{name} is called as {called_as}, and {offered}{hint}")
        if unknown:
            return
    try:
        signature.bind_partial(None, None)
    except TypeError:
        yield Problem(
            "reward.function",
            f"{name} takes {signature}, but is called with {called_with}. Write `def "
            f"{name.rpartition(':')[2]}{called_with}`",
        )
        return
    try:
        signature.bind(None, None, **args)
    except TypeError as error:
        yield Problem("reward.args", f"{name} is called as {called_as}, which it does not take: {error}")
