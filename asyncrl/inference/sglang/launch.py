"""Launch lines: config, model and placement become argv and environment. Pure functions.

The flags and their effects were measured with sglang 0.5.23, sglang-router 0.3.2 and smg 1.13.0.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.config.checks.engine_args import engine_arguments
from asyncrl.config.environment import nccl_settings, without_expandable_segments
from asyncrl.config.layout import Device, DType, EnginePlacement
from asyncrl.config.memory.engine import COLOCATED_MEMORY_FRACTION, CPU_MAX_TOTAL_TOKENS
from asyncrl.config.sections.inference import EngineConfig, RouterConfig, ServingConfig
from asyncrl.inference.engines.ports import EnginePorts
from asyncrl.inference.sglang.cpu_platform import PLATFORM_NAME

_CPU_MAX_RUNNING_REQUESTS = 128
_DAY_S = 86400
_ENGINE_KEEP_ALIVE_S = 600


def engine_argv(
    config: EngineConfig | ServingConfig,
    placement: EnginePlacement,
    ports: EnginePorts,
    *,
    model_path: Path,
    host: str,
    device: Device,
    dtype: DType,
    context_length: int | None,
) -> tuple[str, ...]:
    """argv of one engine; `config.server_args` were checked with the configuration and win over the defaults here."""
    arguments: dict[str, Any] = {
        "model_path": str(model_path),
        "host": host,
        "port": ports.http,
        "nccl_port": ports.nccl,
        "engine_info_bootstrap_port": ports.bootstrap,
        "device": device,
        # Never auto: SGLang turns a float32 checkpoint into float16.
        "dtype": dtype,
        "tp_size": placement.tensor_parallel,
        "max_total_tokens": config.max_total_tokens,
        "max_running_requests": config.max_running_requests,
        "context_length": context_length,
        "skip_server_warmup": True,
        "log_level_http": "warning",
        # An idle scheduler spins at more than half a core without it, a paused one also with it. Where ranks of
        # attention take turns with each other at every step, one that sleeps would hold the others up.
        "sleep_on_idle": not config.server_args.get("enable_dp_attention"),
    }
    if device == "cpu":
        arguments["max_total_tokens"] = config.max_total_tokens or CPU_MAX_TOTAL_TOKENS
        arguments["max_running_requests"] = config.max_running_requests or _CPU_MAX_RUNNING_REQUESTS
        arguments["grammar_backend"] = "none"
    if placement.colocated:
        arguments["enable_memory_saver"] = True
        arguments["mem_fraction_static"] = COLOCATED_MEMORY_FRACTION
    arguments |= config.server_args
    denied = [name for name, value in config.server_args.items() if value is False and _is_negatable(name)]
    denials = ["--no-" + name.replace("_", "-") for name in denied]
    return (sys.executable, "-m", "sglang.launch_server", *_to_flags(arguments), *denials)


def _is_negatable(name: str) -> bool:
    """Whether the switch is on unless the engine is told `--no-NAME`."""
    argument = engine_arguments().get(name)
    return argument is not None and argument.negatable


def engine_environment(
    config: EngineConfig | ServingConfig,
    placement: EnginePlacement,
    environ: Mapping[str, str],
    *,
    threads: int | None,
    cores: tuple[int, ...],
    scratch: Path | None,
) -> dict[str, str]:
    """Variables of an engine's environment on top of the host's; `environ` is that of the job.

    On CPU each rank computes with so many `threads` (None: an engine on GPUs) on `cores`. Its sockets and temporary
    files lie in `scratch`, so that they go with it. None: in the machine's directory, as on GPUs, where compile caches
    lie there that are worth keeping.
    """
    environment = {
        "CUDA_VISIBLE_DEVICES": placement.visible_devices,
        # With torchrun's value the engine's own rendezvous waits for a store that no process serves.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        # /health as a generation never answers while the engine is paused.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "TOKENIZERS_PARALLELISM": "false",
        # The router keeps idle connections for 90 s. An engine that closes them first (after 5 s by default) meets a
        # request on the way: the router then answers 500.
        "SGLANG_TIMEOUT_KEEP_ALIVE": str(_ENGINE_KEEP_ALIVE_S),
        # The job's servers bind to loopback; so does the wire of its weights.
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if placement.colocated:
        # Without it the engine keeps the memory of its CUDA graphs when it is told to release them.
        environment["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "true"
    if threads is None:
        environment |= nccl_settings(environ, config.server_args)
        if placement.colocated:  # the memory saver refuses them
            environment |= without_expandable_segments(environ)
        if "GPU-" in environ.get("CUDA_VISIBLE_DEVICES", ""):  # the indices that stand for UUIDs are the driver's
            environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    else:
        environment |= {
            "SGLANG_PLATFORM": PLATFORM_NAME,
            "OMP_NUM_THREADS": str(threads),
            # A crash must end the process at once: there is no GPU to dump, and the stacks are not read.
            "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
            "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": "0",
            "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
        }
        if scratch is not None:
            environment["TMPDIR"] = str(scratch)
        if placement.tensor_parallel > 1:
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = bind_threads(cores, placement.tensor_parallel)
    return environment


def bind_threads(cores: tuple[int, ...], ranks: int) -> str:
    """Cores for each tensor-parallel rank on CPU: SGLang wants them spelled out when ranks exceed NUMA nodes.

    `0,1|2,3` for four cores and two ranks; with fewer cores than ranks, ranks share.
    """
    share = len(cores) // ranks
    if share == 0:
        return "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    return "|".join(",".join(map(str, cores[rank * share : (rank + 1) * share])) for rank in range(ranks))


def router_argv(config: RouterConfig, *, host: str, port: int, prometheus_port: int) -> tuple[str, ...]:
    """argv of the router; `config.args` were checked with the configuration and win over the defaults here.

    It starts without workers; the controller adds them as they come to serve.
    """
    arguments: dict[str, Any] = {
        "host": host,
        "port": port,
        "policy": config.policy,
        "assignment_mode": config.assignment,
        "prometheus_host": host,
        # Its default is one fixed port for every router of the machine.
        "prometheus_port": prometheus_port,
        # Costs nothing and is answered while an engine is paused, unlike /health and /ready.
        "health_check_endpoint": "/ping",
        "health_check_interval_secs": config.health_interval_s,
        "health_check_timeout_secs": 5,
        "health_failure_threshold": config.health_failures,
        "health_success_threshold": 1,
        # A retry is the client's own: it knows the request, its deadline and its attempts.
        "disable_retries": True,
        "disable_circuit_breaker": config.breaker_failures is None,
        "cb_failure_threshold": config.breaker_failures,
        "cb_success_threshold": 1,
        # The client's deadline (rollout.request_timeout_s) ends a request, and the router passes the end on.
        "request_timeout_secs": _DAY_S,
        # An engine is added only when it answers. If the router looked longer, it would find an engine that ended
        # meanwhile when that comes back on its port, without weights.
        "worker_startup_timeout_secs": 10,
        "worker_startup_check_interval": 1,
        "shutdown_grace_period_secs": 1,
        "log_level": "warn",
    }
    if config.package == "smg":
        arguments |= {
            # Engines get token ids; a tokenizer would only be looked for.
            "disable_tokenizer_autoload": True,
            # A paused engine makes no token either, and a batch is a full queue.
            "worker_wedge_secs": _DAY_S,
            "disable_worker_overload_protection": True,
            # Ask engines for their load only where the policy needs it.
            "disable_load_monitoring": True,
        }
    arguments |= config.args
    return (sys.executable, "-m", "asyncrl.inference.routing.router_main", config.package, *_to_flags(arguments))


def _to_flags(arguments: Mapping[str, Any]) -> list[str]:
    """{chunked_prefill_size: 2048, sleep_on_idle: True} → --chunked-prefill-size 2048 --sleep-on-idle.

    None and False leave an argument out; a list becomes several values; a dict becomes JSON.
    """
    flags: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        flags.append("--" + name.replace("_", "-"))
        if isinstance(value, dict):
            flags.append(json.dumps(value))
        elif isinstance(value, list | tuple):
            flags.extend(map(str, value))
        elif value is not True:
            flags.append(str(value))
    return flags
