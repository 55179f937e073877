"""The chosen router: its policies, and which of its arguments the job sets or rules out itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec

from asyncrl.config.arguments.argument_list import argument_problems
from asyncrl.config.problems import Problem
from asyncrl.config.sections.inference import RouterConfig

PREFIX = "router.args"

MODULES: Mapping[str, str] = {"sglang-router": "sglang_router", "smg": "smg"}
"""Value of router.package → module to import."""

INSTALL: Mapping[str, str] = {
    "sglang-router": "pip install sglang-router==0.3.2",
    "smg": "pip install 'asyncrl[smg]', or set it to sglang-router",
}

KEYED_POLICIES = frozenset({"manual", "consistent_hashing"})
"""Policies that route by key."""

_ONLY_SMG: Mapping[str, str] = {
    "cache_aware": "sglang-router looks at text and sees no token ids: everything would go to one engine until that "
    "has 64 requests more than the others",
    "least_load": "sglang-router has no such policy",
    "consistent_hashing": "sglang-router has no such policy",
}

_CLIENT_RETRIES = "a request that failed is sent again by the client alone; use rollout.request_retries"
_KEY = "the job makes a key of its own for control calls; leave it out"
_LOOPBACK = "the servers of a job speak plain HTTP on loopback; leave it out"
_CONTROLLER = "the controller tells the router of engines as they come to serve; leave it out"
_PLAIN = "an engine does prefill and decode; leave it out"
_BREAKER = "use router.breaker_failures"

RESERVED: Mapping[str, str] = {
    "host": "use run.host",
    "port": "use router.port",
    "policy": "use router.policy",
    "assignment_mode": "use router.assignment",
    "routing_key_override": "use router.sticky",
    "routing_key_headers": "use router.sticky",
    "prometheus_host": "use run.host",
    "prometheus_port": "the job picks a free port and the router's log names it; leave it out",
    "worker_urls": _CONTROLLER,
    "service_discovery": _CONTROLLER,
    "discovery_provider": _CONTROLLER,
    "remove_unhealthy_workers": _CONTROLLER,
    "health_check_endpoint": "an engine answers /ping while it is paused, and other endpoints do not; leave it out",
    "health_check_interval_secs": "use router.health_interval_s",
    "health_failure_threshold": "use router.health_failures",
    "disable_retries": _CLIENT_RETRIES,
    "retry_max_retries": _CLIENT_RETRIES,
    "disable_circuit_breaker": _BREAKER,
    "cb_failure_threshold": _BREAKER,
    "request_timeout_secs": "use rollout.request_timeout_s",
    "pd_disaggregation": _PLAIN,
    "epd_disaggregation": _PLAIN,
    "mini_lb": _PLAIN,
    "prefill": _PLAIN,
    "decode": _PLAIN,
    "encode": _PLAIN,
    "api_key": _LOOPBACK,
    "tenant_api_key": _LOOPBACK,
    "control_plane_api_keys": _KEY,
    "jwt_issuer": _LOOPBACK,
    "tls_cert_path": _LOOPBACK,
    "tls_key_path": _LOOPBACK,
}
"""Arguments that the job sets or rules out itself → what the user should do instead. Some exist in one router only."""


def router_problems(config: RouterConfig) -> list[Problem]:
    """Settings that the router would refuse or could not follow."""
    if find_spec(MODULES[config.package]) is None:
        return [Problem("router.package", f"{config.package} is not installed; run {INSTALL[config.package]}")]
    arguments = argument_problems(
        config.args,
        config.package,
        key=PREFIX,
        reserved=RESERVED,
        taker="the router",
        unknown=f"{config.package} has no such argument",
    )
    return [*_policy_problems(config), *arguments]


def _policy_problems(config: RouterConfig) -> Iterator[Problem]:
    if config.package == "sglang-router" and config.policy in _ONLY_SMG:
        yield Problem(
            "router.policy",
            f"{config.policy} needs router.package smg ({_ONLY_SMG[config.policy]}); or use round_robin",
        )
    keyed = config.policy in KEYED_POLICIES
    if keyed and config.sticky == "off":
        yield Problem(
            "router.policy", f"{config.policy} routes by key, and none is sent; set router.sticky to sample or group"
        )
    if not keyed and config.sticky != "off":
        yield Problem("router.sticky", f"{config.sticky} has no effect on {config.policy}; set router.policy to manual")
