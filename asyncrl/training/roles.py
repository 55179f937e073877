"""Roles: the weights that the trainer's ranks hold, each under a name. Pure data, no torch.

Every rank holds its part of every role. A command names the role that it is for.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from asyncrl.config import Config
from asyncrl.config.sections.algorithm import REFERENCE, TEACHER

ACTOR = "actor"
"""The policy: it is trained, published and exported."""


class Role(msgspec.Struct, frozen=True):
    """Weights under a name."""

    name: str
    model: str
    """Hugging Face directory that they are loaded from."""
    trained: bool = True
    """False: weights alone, without gradients and optimizer, for log-probs."""


def frozen_roles(names: Iterable[str], config: Config) -> tuple[Role, ...]:
    """The roles that never train of an algorithm that needs `names`. A reference without a model of its own begins as
    the policy's model."""
    models = {REFERENCE: config.algorithm.reference or config.model.path, TEACHER: config.algorithm.teacher}
    return tuple(Role(name, str(models[name]), trained=False) for name in names)
