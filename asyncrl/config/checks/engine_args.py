"""Server arguments of the engine: which ones the job sets or rules out itself, and what else is wrong with them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.config.arguments.argument_list import Argument, argument_list, argument_problems
from asyncrl.config.problems import Problem

PREFIX = "engine.server_args"
PACKAGE = "sglang"

_CONFIG_FILE = "write its settings into this table; leave it out"

_JOB_PORTS = "the job picks free ports itself; leave it out"
_HTTP_ONLY = "the job speaks HTTP to its engines; leave it out"
_ONE_NODE = "an engine runs on one node; leave it out"
_TENSOR_PARALLEL_ONLY = (
    "new weights reach tensor-parallel ranks only; for more replicas use engine.num_engines, for larger ones "
    "engine.tensor_parallel"
)
_KEY = "the job makes a key of its own for control calls; leave it out"
_LOOPBACK = "the servers of a job speak plain HTTP on loopback; leave it out"

RESERVED: Mapping[str, str] = {
    "config": _CONFIG_FILE,
    "model_path": "use model.path",
    "tokenizer_path": "use model.path",
    "host": "use run.host",
    "port": _JOB_PORTS,
    "nccl_port": _JOB_PORTS,
    "dist_init_addr": _JOB_PORTS,
    "gated_launch_port": _JOB_PORTS,
    "engine_info_bootstrap_port": _JOB_PORTS,
    "grpc_port": _HTTP_ONLY,
    "smg_grpc_mode": _HTTP_ONLY,
    "grpc_mode": _HTTP_ONLY,
    "smg_http_sidecar_port": _HTTP_ONLY,
    "nnodes": _ONE_NODE,
    "node_rank": _ONE_NODE,
    "tp_size": "use engine.tensor_parallel",
    "pp_size": _TENSOR_PARALLEL_ONLY,
    "dp_size": _TENSOR_PARALLEL_ONLY,
    "attn_dp_size": _TENSOR_PARALLEL_ONLY,
    "enable_dp_attention": _TENSOR_PARALLEL_ONLY,
    "base_gpu_id": "use engine.gpus",
    "gpu_id_step": "use engine.gpus",
    "device": "use engine.device",
    "dtype": "use model.dtype",
    "context_length": "use model.context_length",
    "max_total_tokens": "use engine.max_total_tokens",
    "max_running_requests": "use engine.max_running_requests",
    "enable_memory_saver": "it follows from engine.colocate",
    "skip_server_warmup": "readiness is probed with a generation of the job's own; leave it out",
    "weight_version": "each publication stamps it; leave it out",
    "disaggregation_mode": "an engine does prefill and decode; leave it out",
    "api_key": _KEY,
    "admin_api_key": _KEY,
    "ssl_keyfile": _LOOPBACK,
    "ssl_certfile": _LOOPBACK,
}
"""Arguments that the job sets or rules out itself → what the user should do instead."""


_OWN = re.compile(r"engine\.(?=tensor_parallel|num_engines|gpus|max_)|model\.(?=path|context_length)")
"""Settings that engines beside those of the trained model have in a section of their own."""


def engine_arguments() -> Mapping[str, Argument]:
    """All arguments that the engine's command line takes, by name."""
    return argument_list(PACKAGE).arguments


def server_arg_problems(server_args: Mapping[str, Any], section: str = "engine") -> Iterator[Problem]:
    """What is wrong with the server arguments of the engines in `section`."""
    yield from argument_problems(
        server_args,
        PACKAGE,
        key=f"{section}.server_args",
        reserved={
            name: reason if section == "engine" else _OWN.sub(f"{section}.", reason)
            for name, reason in RESERVED.items()
        },
        taker="the engine",
        unknown="SGLang has no such server argument",
    )
