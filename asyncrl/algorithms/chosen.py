"""The algorithm that `train.algorithm` names, made once for each part of a job that asks it.

Invariants
- This is the one place that knows which algorithm runs; everything else asks the object.
- Whatever an algorithm raises or returns that cannot be trained on is one AlgorithmError that names it. A loss that is
  not finite is the learner's affair, which stops or skips (`train.on_nonfinite`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, NoReturn

import torch
from torch import Tensor

from asyncrl.algorithms.algorithm import STALENESS, Algorithm, Columns, Needs, TokenInputs, TokenLoss
from asyncrl.algorithms.cispo import Cispo
from asyncrl.algorithms.distill import Distill
from asyncrl.algorithms.grpo import Dapo, DrGrpo, Grpo
from asyncrl.algorithms.gspo import Gspo, GspoToken
from asyncrl.algorithms.off_policy import Correction
from asyncrl.algorithms.policy_gradient import PolicyGradient
from asyncrl.algorithms.reinforce import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from asyncrl.algorithms.rloo import Rloo
from asyncrl.algorithms.sft import Sft
from asyncrl.config import Config
from asyncrl.config.sections.algorithm import REFERENCE, TEACHER
from asyncrl.data.batch import RolloutBatch
from asyncrl.data.dotted_path import resolve_dotted_path
from asyncrl.data.staleness import step_of
from asyncrl.errors import AlgorithmError, AsyncRLError, ConfigError, describe_exception

POLICY_GRADIENTS: Mapping[str, type[PolicyGradient]] = {
    "grpo": Grpo,
    "dr_grpo": DrGrpo,
    "dapo": Dapo,
    "gspo": Gspo,
    "gspo_token": GspoToken,
    "cispo": Cispo,
    "distill": Distill,
    "rloo": Rloo,
    "reinforce_pp": ReinforcePlusPlus,
    "reinforce_pp_baseline": ReinforcePlusPlusBaseline,
}
"""With sft, the algorithms of the project; the configuration lists the same names (`config/checks/named_code.py`)."""

_FIGURES = frozenset(
    {
        *("loss", "tokens", "entropy"),
        *("logprob_diff", "logprob_diff_tokens", "policy_moved", "policy_moved_tokens"),
    }
)
"""Names that the learner reports itself."""


class ChosenAlgorithm:
    """An algorithm whose every answer is checked."""

    def __init__(self, name: str, algorithm: Algorithm) -> None:
        self._name = name
        self._algorithm = algorithm
        self.needs: Needs = algorithm.needs

    def columns(self, batch: RolloutBatch) -> Columns:
        """As `Algorithm.columns`, with the columns that `needs` asks for: float32 [T], contiguous.

        Raises AlgorithmError: it failed, or a column is no finite number for each sampled token.
        """
        with self._blamed("columns"):
            made: Any = self._algorithm.columns(batch)
        if not isinstance(made, Columns):
            self._refuse(f"columns returned {type(made).__name__}, not Columns")
        for name, column in made.tokens.items():
            self._check(name, column, batch)
        tokens = {name: column.detach().to("cpu", torch.float32).contiguous() for name, column in made.tokens.items()}
        if self.needs.staleness:
            tokens[STALENESS] = token_staleness(batch)
        if made.keep is not None and (made.keep.shape != (len(batch.tokens),) or made.keep.dtype != torch.bool):
            self._refuse(
                f"columns returned keep as {made.keep.dtype} {list(made.keep.shape)}, not a bool of each token"
            )
        return Columns(tokens, {name: float(value) for name, value in made.metrics.items()}, made.keep)

    def loss(self, tokens: TokenInputs) -> TokenLoss:
        """As `Algorithm.loss`. Raises AlgorithmError: it failed, or returned no sums to differentiate and add up."""
        with self._blamed("loss"):
            made: Any = self._algorithm.loss(tokens)
        if not isinstance(made, TokenLoss):
            self._refuse(f"loss returned {type(made).__name__}, not TokenLoss")
        if made.loss.shape != () or not made.loss.requires_grad:
            self._refuse(
                f"loss returned a loss of shape {list(made.loss.shape)}"
                f"{'' if made.loss.requires_grad else ' without gradient'}; return a sum over tokens.logprobs"
            )
        for name, value in {**made.sums, **made.maxima}.items():
            if name in _FIGURES:
                self._refuse(f"loss returned a figure {name!r}, which the learner reports itself; give it another name")
            if not isinstance(value, Tensor) or value.shape != ():
                self._refuse(f"loss returned a figure {name!r} that is no scalar tensor")
        return made

    def _check(self, name: str, column: Any, batch: RolloutBatch) -> None:
        count = len(batch.tokens)
        if not isinstance(column, Tensor) or column.shape != (count,):
            found = list(column.shape) if isinstance(column, Tensor) else type(column).__name__
            self._refuse(
                f"column {name!r} is {found}, not one number for each of the {count} tokens; spread numbers of samples "
                "with values[batch.token_samples]"
            )
        bad = batch.sampled & ~column.detach().cpu().isfinite()
        if bool(bad.any()):
            sample = batch.sample_ids[int(batch.token_samples[bad][0])]
            self._refuse(f"column {name!r} is not finite at {int(bad.sum())} tokens, first in sample {sample}")

    @contextmanager
    def _blamed(self, method: str) -> Iterator[None]:
        try:
            yield
        except AsyncRLError:
            raise
        except Exception as error:  # whatever the user's code raises
            raise AlgorithmError(
                f"train.algorithm: {self._name} failed in {method}: {describe_exception(error)}"
            ) from error

    def _refuse(self, what: str) -> NoReturn:
        raise AlgorithmError(f"train.algorithm: {self._name}: {what}")


SFT = ChosenAlgorithm("sft", Sft())
"""What supervised steps run, whatever the algorithm of the job."""


def make_algorithm(config: Config) -> ChosenAlgorithm:
    """The algorithm of the job.

    Raises ConfigError: it does not import, its constructor refuses `train.algorithm_args`, it is no `Algorithm`, or it
    compares more samples of a prompt than are sampled.
    """
    name = config.train.algorithm
    if name in POLICY_GRADIENTS:
        made: Algorithm = _policy_gradient(POLICY_GRADIENTS[name], config)
    else:
        made = Sft() if name == "sft" else _own(name, config)
    chosen = ChosenAlgorithm(name, made)
    for role in chosen.needs.roles:
        if role not in (REFERENCE, TEACHER):
            raise ConfigError(f"train.algorithm: {name} needs a role {role!r}; there are {REFERENCE} and {TEACHER}")
        if role == TEACHER and config.algorithm.teacher is None:
            raise ConfigError(f"algorithm.teacher: is not set, and {name} needs one; give the directory of a model")
    samples, needed = config.rollout.samples_per_prompt, chosen.needs.group_samples
    if samples < needed:
        raise ConfigError(f"rollout.samples_per_prompt: {samples} is too few for {name}; use at least {needed}")
    return chosen


def _policy_gradient(kind: type[PolicyGradient], config: Config) -> PolicyGradient:
    return kind(**_shared_settings(config))


def _shared_settings(config: Config) -> dict[str, Any]:
    """What the section `algorithm` gives the constructor of a policy gradient."""
    given = config.algorithm
    correction = Correction(given.correction, given.correction_level, given.correction_upper, given.correction_lower)
    own: dict[str, Any] = {}
    if given.advantage_function is not None:
        own["own_advantages"] = _own_advantages(given.advantage_function)
    if given.loss_function is not None:
        own["own_losses"] = _own_losses(given.loss_function)
    if given.correction != "off":
        own["correction"] = correction
    return {**given.given(), **own, "max_new_tokens": config.rollout.max_new_tokens}


def _own_advantages(path: str) -> Callable[[Tensor, RolloutBatch], Tensor]:
    """The user's function, of rewards [N] and the batch; AlgorithmError where it gives no finite [N] or [T]."""
    setting = "algorithm.advantage_function"
    function = resolve_dotted_path(path, setting=setting, error=ConfigError)

    def advantages(rewards: Tensor, batch: RolloutBatch) -> Tensor:
        made = _called(setting, path, function, rewards, batch)
        allowed = ((batch.num_samples,), (len(batch.tokens),))
        if not isinstance(made, Tensor) or tuple(made.shape) not in allowed:
            raise AlgorithmError(
                f"{setting}: {path} returned {_shape(made)}, not one number for each of the {batch.num_samples} "
                f"samples or of the {len(batch.tokens)} tokens"
            )
        bad = ~made.isfinite() if len(made) == batch.num_samples else ~made.isfinite() & batch.sampled
        if bool(bad.any()):
            raise AlgorithmError(f"{setting}: {path} returned {int(bad.sum())} numbers that are not finite")
        return made.detach().float()

    return advantages


def _own_losses(path: str) -> Callable[[TokenInputs], Tensor]:
    """The user's function; AlgorithmError where it does not give one number with gradient for each token."""
    setting = "algorithm.loss_function"
    function = resolve_dotted_path(path, setting=setting, error=ConfigError)

    def losses(tokens: TokenInputs) -> Tensor:
        made = _called(setting, path, function, tokens)
        if not isinstance(made, Tensor) or made.shape != tokens.mask.shape or not made.requires_grad:
            raise AlgorithmError(
                f"{setting}: {path} returned {_shape(made)}, not a loss with gradient for each of the "
                f"{len(tokens.mask)} tokens"
            )
        return made

    return losses


def _called(setting: str, path: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:  # whatever the user's code raises
        raise AlgorithmError(f"{setting}: {path} failed: {describe_exception(error)}") from error


def _shape(made: Any) -> str:
    return f"a tensor of shape {list(made.shape)}" if isinstance(made, Tensor) else type(made).__name__


def token_staleness(batch: RolloutBatch) -> Tensor:
    """float32 [T]: rollout batches trained between the weights that made a token and those before the step; NaN for
    context, and where no version tells it."""
    staleness = torch.full((len(batch.tokens),), torch.nan)
    starts = (batch.sequence_lengths.cumsum(0) - batch.sequence_lengths).tolist()
    for start, spans in zip(starts, batch.versions, strict=True):
        for span in spans:
            if (step := step_of(span.version)) is not None:
                staleness[start + span.start : start + span.end] = batch.rollout_id - step
    return staleness


def _own(name: str, config: Config) -> Algorithm:
    """A class of the user's. One that derives from a policy gradient gets the settings of [algorithm] too."""
    make, arguments = (
        resolve_dotted_path(name, setting="train.algorithm", error=ConfigError),
        config.train.algorithm_args,
    )
    given = ", ".join(arguments) or "no arguments"
    shared: dict[str, Any] = {}
    if isinstance(make, type) and issubclass(make, PolicyGradient):
        shared, known = _shared_settings(config), {field.name for field in fields(make)}
        if unknown := shared.keys() - known - {"max_new_tokens"}:
            raise ConfigError(f"algorithm.{min(unknown)}: {name} has no such setting")
    elif unused := config.algorithm.model_fields_set - {"reference", "reference_interval", "teacher"}:
        raise ConfigError(f"algorithm.{min(unused)}: is for policy gradients, and {name} derives from none of them")
    try:
        made: Algorithm = make(**{**shared, **arguments})
        needs = made.needs
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(
            f"train.algorithm: {name} cannot be made with train.algorithm_args ({given}): {describe_exception(error)}"
        ) from error
    if not isinstance(needs, Needs) or not callable(getattr(made, "columns", None)) or not hasattr(made, "loss"):
        raise ConfigError(
            f"train.algorithm: {name} is no algorithm: it needs `needs` (a Needs), `columns` and `loss`, as "
            "asyncrl.algorithms.algorithm says"
        )
    return made
