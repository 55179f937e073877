"""The variables of processes on GPUs: trainer ranks and engines, decided in one place. Pure functions.

Invariants
- Where ranks and engines form NCCL groups with each other, both get NCCL's settings from `nccl_settings`. Elsewhere
  ranks keep NCCL's own.
- A variable that the user set stays, unless an engine would overwrite it or a process could not run with it.
- What is for trainer ranks alone never reaches an engine: `host_environment` leaves out what `OF_RANKS` names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from asyncrl.config.layout import ProcessLayout
from asyncrl.config.root import Config

OF_RANKS = "ASYNCRL_OF_RANKS"
"""Names the variables that `rank_settings` has set for trainer ranks alone."""

ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Both names that torch knows for the settings of its allocator."""

HEARTBEAT = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
"""How long torch lets the thread that watches an NCCL group stand still before it ends the process. In seconds."""

_HEARTBEAT_S = 480
"""torch's own."""

_EXPANDABLE = "expandable_segments"


def nccl_settings(environ: Mapping[str, str], server_args: Mapping[str, Any]) -> dict[str, str]:
    """NCCL's settings, which both ends of a group must share: the user's, else those that an engine would choose.

    An engine with symmetric memory or NVLS (in `server_args`) overwrites also the user's. NCCL itself has other
    defaults, so a rank with nothing set would differ from every engine.
    """
    symmetric = bool(server_args.get("enable_symm_mem"))
    forced = {
        "NCCL_CUMEM_ENABLE": symmetric,
        "NCCL_NVLS_ENABLE": symmetric or bool(server_args.get("enable_nccl_nvls")),
    }
    return {name: "1" if on else environ.get(name, "0") for name, on in forced.items()}


def rank_settings(environ: Mapping[str, str], layout: ProcessLayout, config: Config) -> dict[str, str]:
    """What a trainer rank adds to its environment before it imports torch."""
    # Megatron orders communication before computation by having one queue on the GPU. It warns on a CPU too.
    alone = {"CUDA_DEVICE_MAX_CONNECTIONS": environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")}
    shared: dict[str, str] = {}
    if layout.device == "cuda":
        if "broadcast" in layout.transports:
            shared = nccl_settings(environ, config.engine.server_args)
        if HEARTBEAT not in environ:  # a rank that hangs is named at the deadline of its command, before torch ends it
            alone[HEARTBEAT] = str(max(_HEARTBEAT_S, math.ceil(config.train.collective_timeout_s)))
        if layout.colocated:
            # Engines map the trainer's tensors; they could not map those of expandable segments in every container. The
            # user's other options reach engines too.
            shared |= without_expandable_segments(environ)
        elif not any(name in environ for name in ALLOCATOR):
            alone[ALLOCATOR[0]] = f"{_EXPANDABLE}:True"
    return shared | alone | {OF_RANKS: ",".join(alone)}


def without_expandable_segments(environ: Mapping[str, str]) -> dict[str, str]:
    """The allocator's variables that the user set, less what switches expandable segments on; {} where none does."""
    changed = {}
    for name in ALLOCATOR:
        kept = [part for part in environ.get(name, "").split(",") if part.split(":")[0].strip() != _EXPANDABLE]
        if environ.get(name, "") != ",".join(kept):
            changed[name] = ",".join(kept)
    return changed


def not_of_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what `rank_settings` has set for trainer ranks alone."""
    alone = {OF_RANKS, *environ.get(OF_RANKS, "").split(",")}
    return {name: value for name, value in environ.items() if name not in alone}
