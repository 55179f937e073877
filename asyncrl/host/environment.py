"""The environment of the host, and so of everything that it starts."""

from __future__ import annotations

import os

from asyncrl.config.environment import not_of_ranks

_RANK_VARIABLES = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
}


def host_environment() -> dict[str, str]:
    """Rank 0's environment without variables of ranks: no process of the host is a rank of the trainer.

    (With TORCHELASTIC_USE_AGENT_STORE an engine would look for its own rendezvous at the trainer's.)
    """
    return {
        name: value
        for name, value in not_of_ranks(os.environ).items()
        if name not in _RANK_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
