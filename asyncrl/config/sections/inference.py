"""Engines and their router."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from asyncrl.config.sections.base import Section


class EngineConfig(Section):
    """The SGLang engines that generate."""

    num_engines: int | None = Field(default=None, ge=1, le=4096)
    """Engines to start. none: as many as the free GPUs hold, or one on CPU; no engine if there are external ones."""

    tensor_parallel: int = Field(default=1, ge=1)
    """Ranks of one engine."""

    gpus: tuple[int, ...] | None = None
    """GPUs for the engines, by index among those that the job sees on the node of rank 0. none: all GPUs that no
    trainer rank uses."""

    colocate: bool = False
    """Put engines on the trainer ranks' GPUs, and offload their memory while the trainer trains. Always so where a node
    has a single GPU."""

    colocate_memory_peak_device: Literal["gpu", "cpu"] = "gpu"
    """Where memory peaks while colocated engines make room for the trainer at the start. gpu: they release their KV
    cache only, and their weights stay beside the trainer's. cpu: they release everything, their weights too, which are
    gone then and come back with the first publication."""

    external: tuple[str, ...] = ()
    """Engines that somebody else runs, as http://host:port; `asyncrl engine MODEL` starts one. They must serve the same
    model, and belong to one job at a time. They get weights as the job's own engines do, and go on when the job ends.
    One that goes away, or is not there at the start while others are, is out of service until it answers."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where engines run; auto is cuda when the job sees a GPU."""

    max_total_tokens: int | None = Field(default=None, ge=1)
    """Size of the KV pool in tokens; none: 65536 on CPU, the engine's own choice on GPU."""

    max_running_requests: int | None = Field(default=None, ge=1)
    """Requests that one engine decodes at once; none: 128 on CPU, the engine's own choice on GPU."""

    server_args: dict[str, Any] = Field(default_factory=dict)
    """Any other SGLang server argument, by its name with underscores (for example {chunked_prefill_size = 2048});
    checked against the engine's own list."""

    start_timeout_s: float = Field(default=600.0, gt=0)
    """Longest time from spawn to the first real generation."""

    cpus: tuple[int, ...] | None = None
    """CPU cores that the engines are bound to; none does not bind."""

    max_restarts: int = Field(default=5, ge=0)
    """Restarts of one engine, and of the router, within restart_window_s. At its next end it is given up. The job ends
    with its last engine. 0: no restart."""

    restart_window_s: float = Field(default=1800.0, gt=0)
    """Restarts that are longer ago than this do not count."""

    min_serving: int = Field(default=1, ge=1)
    """A publication waits until this many engines can take weights; the others get them when they are back."""

    drain_timeout_s: float = Field(default=600.0, ge=0)
    """Longest time that an engine which is taken out of service may spend on its requests."""


class ServingConfig(Section):
    """Engines beside those of the trained model. Settings that are not here are those of engine and router."""

    num_engines: int = Field(default=1, ge=1, le=4096)
    """Engines to start."""

    tensor_parallel: int = Field(default=1, ge=1)
    """Ranks of one engine."""

    gpus: tuple[int, ...] | None = None
    """GPUs for these engines, by index among those that the job sees on the node of rank 0. none: the last GPUs that no
    trainer rank uses."""

    max_total_tokens: int | None = Field(default=None, ge=1)
    """Size of the KV pool in tokens; none: as for the trained model's engines by default."""

    max_running_requests: int | None = Field(default=None, ge=1)
    """Requests that one engine decodes at once; none: as for the trained model's engines by default."""

    server_args: dict[str, Any] = Field(default_factory=dict)
    """Any other SGLang server argument, by its name with underscores."""


class ServedModelConfig(ServingConfig):
    """A model that is served beside the trained one, behind a router of its own, and never changes: a judge, or a
    reference. You choose its name. Rewards ask it by `asyncrl.served.served_model(NAME)`."""

    path: Path | None = None
    """Hugging Face directory; none: model.path, the policy as it was at the start."""

    context_length: int | None = Field(default=None, ge=2)
    """Longest prompt + response in tokens; none takes the model's own limit."""


class EvalFleetConfig(ServingConfig):
    """Engines for evaluation only, with a router of their own. They start at the first evaluation, and load a copy of
    the published weights before each. Their start and each evaluation go on beside the loop: neither a step nor a
    publication waits for them. Without them the training engines evaluate, and the loop waits."""


class HealthConfig(Section):
    """Probes that find engines and routers that run but do not answer."""

    interval_s: float = Field(default=10.0, gt=0)
    """Pause between two probes of one engine. It is not probed while it is paused, updated or offloaded."""

    timeout_s: float = Field(default=20.0, gt=0)
    """Longest wait for the answer. An engine answers as soon as it makes any token, so a busy engine counts as
    healthy."""

    failures: int = Field(default=3, ge=1)
    """Failed probes in a row after which a process is killed and started again."""


class RouterConfig(Section):
    """The router in front of the engines."""

    package: Literal["sglang-router", "smg"] = "sglang-router"
    """Which router: sglang-router, or smg, its successor (pip install 'asyncrl[smg]')."""

    policy: Literal["round_robin", "random", "manual", "cache_aware", "least_load", "consistent_hashing"] = (
        "round_robin"
    )
    """How the router picks an engine. manual: by routing key, see sticky. With smg only: cache_aware (the engine that
    holds the longest prefix of the prompt), least_load, consistent_hashing (by routing key; a new engine takes some
    keys over)."""

    sticky: Literal["off", "group", "sample"] = "off"
    """Requests that share a routing key, and so an engine while it lives. group: those of all samples of a prompt,
    which share its KV. sample: those of one sample (turns of a conversation, attempts). Needs policy manual or
    consistent_hashing."""

    assignment: Literal["min_load", "min_group", "random"] = "min_load"
    """Which engine gets a new key under policy manual: the one with the fewest requests, the one whose requests have
    the fewest keys, or any."""

    port: int | None = Field(default=None, ge=1, le=65535)
    """Port on loopback; none picks a free one. A given port that is taken is an error."""

    start_timeout_s: float = Field(default=120.0, gt=0)
    """Longest time until the router answers."""

    health_interval_s: int = Field(default=5, ge=1)
    """Pause between two looks at an engine's /ping, which answers while the engine is paused too."""

    health_failures: int = Field(default=3, ge=1)
    """Failed looks in a row after which an engine gets no requests. It gets some again after one that succeeds."""

    breaker_failures: int | None = Field(default=None, ge=1)
    """Failed requests in a row after which the router sends an engine nothing for a minute: its circuit is open. none:
    no circuits. Circuits punish healthy engines: sglang-router counts 4xx, so that ten over-long prompts for each
    engine shut the whole fleet, and both routers count the 503 of a full queue. Without circuits, dead engines are
    still taken out at once, and hung ones by their health."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Any other argument of the router, by its name with underscores (for example {max_concurrent_requests = 512});
    checked against the router's own list."""


class WeightsConfig(Section):
    """How new weights reach the engines."""

    transport: Literal["auto", "broadcast", "tensor", "disk"] = "auto"
    """auto: tensor handover where an engine shares the trainer's GPU, else broadcast (NCCL on GPU, gloo on CPU)."""

    bucket_mib: int | None = Field(default=None, ge=1)
    """Size of one transfer bucket in MiB. none: 64 on CPU; on GPUs what makes about 30 buckets of the model, between 64
    and 512, and at most a 128th of the GPU's memory."""

    timeout_s: float = Field(default=60.0, gt=0)
    """Longest wait for one bucket; past it the peer counts as hung."""

    lease_timeout_s: float = Field(default=1800.0, gt=0)
    """Longest publication, all its transfers together; past it the controller takes the engines back."""

    attempts: int = Field(default=2, ge=1)
    """Transfers tried within one publication before it fails."""

    on_update: Literal["retract", "in_place", "wait", "abort"] = "retract"
    """What running requests do when new weights arrive. retract: keep their tokens, whose KV the new weights compute
    again; log-probs stay exact for each token. in_place: keep tokens and KV, so that nothing is computed again; log-
    probs of what follows are approximate, as they rest on KV of older weights. wait: end first, while nothing new is
    sent. abort: end at once; afterwards they go on from the tokens they have (partial rollouts), on any engine."""

    keep_published: Literal["auto", "always", "never"] = "auto"
    """Keep a copy of the published weights for engines that join later: a restarted engine serves again without waiting
    for the next publication. auto: where the disk has room for it and for as much again; always: whatever room there
    is. The trainer's host memory holds a copy meanwhile, as much as the weights take, which is written beside the
    training: neither engines nor trainer wait for the disk. On disk there are up to three: the published one, the one
    before, and the files that the next one is written over. never: no copy, and no memory for it."""

    directory: Path | None = None
    """Where that copy and the files of the disk transport lie; none: weights/ in the run directory. On a tmpfs such as
    /dev/shm they stay in memory. External engines load a copy only from here: it must be the same path for them."""

    verify: Literal["first", "always", "never"] = "first"
    """Check by checksums that tensors arrived and that all engines hold the same: on the first publication, on each,
    or never."""
