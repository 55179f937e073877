"""Training backends by name: what each can train, and how a rank gets one.

Importing this module loads neither torch nor a backend's libraries: the driver asks `check_trainable` before anything
starts. A rank calls `make_backend` in the thread that will train, and that loads them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncrl.config import Config
from asyncrl.config.architecture import check_tensor_parallel, read_architecture
from asyncrl.errors import ModelError
from asyncrl.training.ranks.layout import RankLayout
from asyncrl.training.roles import Role

if TYPE_CHECKING:
    from asyncrl.training.learner.backend import Backend


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """A backend that `train.backend` may name."""

    check: Callable[[Config], None]
    """Raises ModelError or ConfigError for a model, numbers (`model.dtype`) or a tensor-parallel size that the backend
    cannot train."""
    make: Callable[[Config, RankLayout, Role], Backend]
    """Makes one rank's part; see `asyncrl.training.learner.backend.BackendFactory`."""


def check_trainable(config: Config) -> None:
    """Raises ModelError or ConfigError where `train.backend` cannot train the job's model."""
    BACKENDS[config.train.backend].check(config)


def make_backend(config: Config, layout: RankLayout, role: Role) -> Backend:
    """One rank's part of a role on the backend that `train.backend` names. Raises as `check_trainable` does."""
    return BACKENDS[config.train.backend].make(config, layout, role)


def _check_megatron(config: Config) -> None:
    """Dense Llama, Qwen2 and Qwen3 models, in float32 or bfloat16; those beside the policy with its vocabulary."""
    policy = read_architecture(config.model.path)
    check_tensor_parallel(policy, config.train.tensor_parallel)
    for role, path in (("reference", config.algorithm.reference), ("teacher", config.algorithm.teacher)):
        if path is None:
            continue
        architecture = read_architecture(path)
        check_tensor_parallel(architecture, config.train.tensor_parallel)
        if architecture.vocab_size != policy.vocab_size:
            raise ModelError(
                f"algorithm.{role}: {path} has a vocabulary of {architecture.vocab_size} ids, and the policy one of "
                f"{policy.vocab_size}; log-probs of the same tokens need the same vocabulary"
            )
        if role == "reference" and config.algorithm.reference_interval is not None and architecture != policy:
            raise ModelError(
                f"algorithm.reference: {path} has another architecture than the policy, whose weights it is to take "
                "over every algorithm.reference_interval steps"
            )


def _make_megatron(config: Config, layout: RankLayout, role: Role) -> Backend:
    from asyncrl.training.megatron.backend import MegatronBackend

    return MegatronBackend(config, layout, role)


BACKENDS = {"megatron": BackendEntry(_check_megatron, _make_megatron)}
"""Every value of `train.backend`; the configuration lists the same names."""
