"""The router's settings are checked against what the chosen router can do."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.config.arguments.argument_list import argument_list
from asyncrl.config.checks import router_args
from asyncrl.config.checks.router_args import MODULES, RESERVED, router_problems
from asyncrl.config.sections.inference import RouterConfig


def problem(**settings: Any) -> str | None:
    found = router_problems(RouterConfig(**settings))
    assert len(found) <= 1
    return str(found[0]) if found else None


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"policy": "random"},
        {"policy": "manual", "sticky": "group"},
        {"policy": "manual", "sticky": "sample", "assignment": "min_group"},
        {"breaker_failures": 50},
        {"args": {"max_concurrent_requests": 512, "queue_timeout_secs": 5}},
        {"args": {"log_level": "debug", "enable_trace": True}},
        {"args": {"request_id_headers": ["x-request-id"]}},
        {"args": {"prometheus_duration_buckets": [0.1, 1, 10]}},
        {"args": {"cb_timeout_duration_secs": 5}},
        {"args": {"max_concurrent_requests": -1}},
    ],
)
def test_what_the_router_takes_passes(settings: dict[str, Any]) -> None:
    assert problem(**settings) is None


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"policy": "manual"}, "router.policy: manual routes by key, and none is sent; set router.sticky"),
        ({"sticky": "group"}, "router.sticky: group has no effect on round_robin; set router.policy to manual"),
        ({"policy": "cache_aware"}, "router.policy: cache_aware needs router.package smg (sglang-router looks at text"),
        ({"policy": "least_load"}, "router.policy: least_load needs router.package smg"),
        ({"args": {"queue_sise": 3}}, "router.args.queue_sise: sglang-router has no such argument; did you mean"),
        ({"args": {"queue_size": "big"}}, "the router expects a whole number"),
        ({"args": {"queue_size": True}}, "the router expects a whole number"),
        ({"args": {"enable_trace": "yes"}}, "the router expects true or false"),
        ({"args": {"log_level": "loud"}}, "one of debug, info, warn, error"),
        ({"args": {"request_id_headers": "x"}}, "the router expects a list"),
        ({"args": {"worker_urls": ["http://x"]}}, "cannot be passed through: the controller tells the router"),
        ({"args": {"port": 1}}, "use router.port"),
        ({"args": {"policy": "random"}}, "use router.policy"),
        ({"args": {"disable_retries": False}}, "use rollout.request_retries"),
        ({"args": {"health_check_endpoint": "/health"}}, "an engine answers /ping while it is paused"),
        ({"args": {"disable_circuit_breaker": True}}, "use router.breaker_failures"),
    ],
)
def test_what_the_router_or_the_job_cannot_take_is_refused(settings: dict[str, Any], text: str) -> None:
    assert text in (problem(**settings) or "")


def test_a_router_that_is_not_installed_is_named_once_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_args, "find_spec", lambda name: None)
    told = problem(package="smg", policy="manual", args={"nonsense": 1})
    assert told == ("router.package: smg is not installed; run pip install 'asyncrl[smg]', or set it to sglang-router")


def test_every_reserved_name_is_an_argument_of_a_router() -> None:
    assert set(RESERVED) <= {name for package in MODULES for name in argument_list(package).arguments}
