"""Which algorithm runs, and what becomes of one that cannot be trained with: one error that names it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.algorithms.aggregation import Aggregation
from asyncrl.algorithms.algorithm import Columns, Needs, TokenInputs, TokenLoss
from asyncrl.algorithms.chosen import POLICY_GRADIENTS, ChosenAlgorithm, make_algorithm, token_staleness
from asyncrl.algorithms.grpo import Grpo
from asyncrl.config import Config
from asyncrl.config.checks.named_code import BUILTIN_ALGORITHMS
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.data.sample import VersionSpan
from asyncrl.errors import AlgorithmError, ConfigError
from tests.training.batches import make_batch

OWN = "tests.algorithms.own:"
ROLLOUT = {"rollout": {"samples_per_prompt": 4, "max_new_tokens": 9}}
BATCH = make_batch([(2, 2), (3, 1)], groups=[0, 0], rewards=[1.0, 0.0])


def config(algorithm: str, samples: int = 4, **args: Any) -> Config:
    train = {"algorithm": algorithm, "algorithm_args": args}
    given = {"clip_low": 0.1, "normalize_advantages": False} if algorithm == "grpo" else {"teacher": "models/teacher"}
    return Config.model_validate(
        {"train": train, "algorithm": given, "rollout": {"samples_per_prompt": samples, "max_new_tokens": 9}}
    )


def test_a_named_algorithm_takes_its_settings_from_the_section_and_one_of_your_own_from_its_arguments() -> None:
    assert make_algorithm(config("grpo"))._algorithm == Grpo(
        clip_low=0.1, clip_high=0.28, normalize_advantages=False, max_new_tokens=9
    )
    own: Any = make_algorithm(config("tests.algorithms.own:WithEntropy", weight=0.5))._algorithm
    assert (own.weight, own.clip_low) == (0.5, 0.2)


@pytest.mark.parametrize(
    ("algorithm", "args", "message"),
    [
        ("tests.algorithms.own:Nothing", {}, "has no 'Nothing'"),
        (
            "tests.algorithms.own:WithEntropy",
            {"wait": 1},
            r"cannot be made with train.algorithm_args \(wait\): TypeError",
        ),
        (
            "tests.algorithms.own:Half",
            {},
            r"cannot be made with .*TypeError: Can't instantiate abstract class Half .*surr",
        ),
        ("builtins:dict", {}, "AttributeError: 'dict' object has no attribute 'needs'"),
        ("types:SimpleNamespace", {"needs": 3}, "is no algorithm: it needs `needs` "),
    ],
)
def test_what_cannot_be_made_is_refused_before_anything_trains(algorithm: str, args: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        make_algorithm(config(algorithm, **args))
    assert "train.algorithm: " in str(refused.value)


def test_the_configuration_names_every_algorithm_and_no_other() -> None:
    made = {name: make_algorithm(config(name)).needs.group_samples for name in [*POLICY_GRADIENTS, "sft"]}
    assert made == {name: known.group_samples for name, known in BUILTIN_ALGORITHMS.items()}


def test_the_configuration_knows_the_settings_of_each_algorithm() -> None:
    section = set(AlgorithmConfig.model_fields)
    for name, kind in POLICY_GRADIENTS.items():
        own = {field.name for field in fields(kind)} - {"max_new_tokens", "own_advantages", "own_losses"}
        correction = {key for key in section if key.startswith("correction")}
        models = {"reference", "reference_interval", "teacher", "advantage_function", "loss_function"}
        assert BUILTIN_ALGORITHMS[name].settings == own | correction | models, name
    assert section == set().union(*(known.settings for known in BUILTIN_ALGORITHMS.values()))


def test_an_algorithm_that_compares_more_samples_than_there_are_is_refused() -> None:
    make_algorithm(config("tests.algorithms.own:WithEntropy", samples=2))
    with pytest.raises(ConfigError, match=r"rollout\.samples_per_prompt: 1 is too few for tests\.algorithms\.own"):
        make_algorithm(config("tests.algorithms.own:WithEntropy", samples=1))


@dataclass(frozen=True)
class Wrong:
    """Answers with what it is given."""

    answer: Callable[[Any], Any]
    needs: Needs = field(default_factory=Needs)

    def columns(self, batch: Any) -> Any:
        return self.answer(batch)

    def loss(self, tokens: Any) -> Any:
        return self.answer(tokens)


def divide(_: Any) -> Any:
    return 1 / 0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (divide, "mine failed in columns: ZeroDivisionError: division by zero"),
        (lambda batch: {}, "mine: columns returned dict, not Columns"),
        (lambda batch: Columns({"a": batch.rewards}), "column 'a' is [2], not one number for each of the 8 tokens"),
        (lambda batch: Columns({"a": 3}), "column 'a' is int, not one number for each"),
        (lambda batch: Columns(keep=batch.rewards > 0), "columns returned keep as torch.bool [2], not a bool of each"),
        (lambda batch: Columns(keep=batch.logprobs), "columns returned keep as torch.float32 [8], not a bool of each"),
        (
            lambda batch: Columns({"a": torch.where(batch.token_samples == 1, torch.nan, 1.0)}),
            "column 'a' is not finite at 1 tokens, first in sample sample-1",
        ),
    ],
)
def test_columns_that_cannot_be_trained_on_are_one_error(answer: Any, message: str) -> None:
    with pytest.raises(AlgorithmError) as refused:
        ChosenAlgorithm("mine", Wrong(answer)).columns(BATCH)
    assert str(refused.value).startswith("train.algorithm: mine") and message in str(refused.value)


def tokens() -> TokenInputs:
    index = torch.zeros(2, dtype=torch.int64)
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    return TokenInputs(logprobs, torch.ones(2), -torch.ones(2), index == 0, {}, index, index, index, torch.ones(2), 1)


def with_figure(name: str, value: Any) -> Callable[[TokenInputs], TokenLoss]:
    return lambda tokens: TokenLoss(tokens.logprobs.sum(), sums={name: value})


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (divide, "mine failed in loss: ZeroDivisionError"),
        (lambda tokens: tokens.advantages, "mine failed in loss: KeyError: 'advantages'"),
        (lambda tokens: tokens.logprobs.sum(), "loss returned Tensor, not TokenLoss"),
        (lambda tokens: TokenLoss(tokens.logprobs), "loss returned a loss of shape [2]; return a sum over"),
        (lambda tokens: TokenLoss(tokens.entropies.sum()), "loss returned a loss of shape [] without gradient"),
        (with_figure("tokens", torch.tensor(1.0)), "a figure 'tokens', which the learner reports itself"),
        (with_figure("mine", torch.ones(2)), "a figure 'mine' that is no scalar tensor"),
    ],
)
def test_a_loss_that_cannot_be_trained_on_is_one_error(answer: Any, message: str) -> None:
    with pytest.raises(AlgorithmError) as refused:
        ChosenAlgorithm("mine", Wrong(answer)).loss(tokens())
    assert str(refused.value).startswith("train.algorithm: mine") and message in str(refused.value)


def test_columns_are_floats_of_32_bits_and_context_may_hold_anything() -> None:
    def answer(batch: Any) -> Columns:
        return Columns({"a": torch.where(batch.sampled, 2, torch.nan).double()}, {"seen": 3})

    made = ChosenAlgorithm("mine", Wrong(answer)).columns(BATCH)
    assert made.tokens["a"].dtype == torch.float32 and made.metrics == {"seen": 3.0}
    assert made.tokens["a"][BATCH.sampled].tolist() == [2.0, 2.0, 2.0]


def test_staleness_is_told_of_every_sampled_token_whose_version_tells_it() -> None:
    versions = ((VersionSpan("0.3", 2, 3), VersionSpan("1.5", 3, 4)), (VersionSpan("torn:4", 3, 4),))
    batch = replace(BATCH, rollout_id=7, versions=versions)
    told: Tensor = token_staleness(batch)
    assert told[2:4].tolist() == [4.0, 2.0] and told[[0, 1, 4, 5, 6, 7]].isnan().all()
    asked = ChosenAlgorithm("mine", Wrong(lambda batch: Columns(), Needs(staleness=True))).columns(batch)
    assert asked.tokens["staleness"][2:4].tolist() == [4.0, 2.0]


def test_an_own_policy_gradient_takes_the_settings_of_the_section_and_another_class_refuses_them() -> None:
    def made(name: str, section: dict[str, Any], **args: Any) -> Any:
        train = {"algorithm": name, "algorithm_args": args}
        return make_algorithm(Config.model_validate({"train": train, "algorithm": section, **ROLLOUT}))._algorithm

    own = made(f"{OWN}LeaveOneOut", {"correction": "mask", "clip_low": 0.1, "aggregation": "fixed"}, clip_high=0.4)
    assert (own.clip_low, own.clip_high, own.correction.kind) == (0.1, 0.4, "mask")
    assert own.needs.aggregation == Aggregation("fixed", 9)
    with pytest.raises(
        ConfigError, match=r"algorithm\.ratio_max: tests\.algorithms\.own:LeaveOneOut has no such setting"
    ):
        made(f"{OWN}LeaveOneOut", {"ratio_max": 3})
    with pytest.raises(ConfigError, match=r"algorithm\.kl: is for policy gradients, and .*Alone derives from none of"):
        made(f"{OWN}Alone", {"kl": "loss"})


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        (("critic",), "needs a role 'critic'; there are reference and teacher"),
        (("teacher",), r"algorithm\.teacher: is not set, and tests\.algorithms\.own:Alone needs one"),
    ],
)
def test_a_role_that_nobody_can_play_is_refused(roles: tuple[str, ...], message: str) -> None:
    train = {"algorithm": f"{OWN}Alone", "algorithm_args": {"roles": roles}}
    with pytest.raises(ConfigError, match=message):
        make_algorithm(Config.model_validate({"train": train, **ROLLOUT}))
