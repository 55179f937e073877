"""Roles: the weights that the trainer's ranks hold, each under a name. Pure data, no torch.

Every rank holds its part of every role. A command names the role that it is for.
"""

from __future__ import annotations

import msgspec

ACTOR = "actor"
"""The policy: it is trained, published and exported."""


class Role(msgspec.Struct, frozen=True):
    """Weights under a name."""

    name: str
    model: str
    """Hugging Face directory that they are loaded from."""
    trained: bool = True
    """False: weights alone, without gradients and optimizer, for log-probs."""
