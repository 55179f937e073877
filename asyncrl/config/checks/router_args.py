"""What the chosen router can do: its policies, and its own argument list, read from its source without importing it.

Both routers declare their command line in `router_args.py` with plain `add_argument` calls. Importing it would load a
shared library of 90 MB.

Invariant: what passes `router_problems` is accepted by the router's own command line, as far as names, types and listed
choices tell.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from asyncrl.config.nearest import did_you_mean, nearest
from asyncrl.config.problems import Problem
from asyncrl.config.reading.redaction import shown
from asyncrl.config.sections.inference import RouterConfig
from asyncrl.errors import ConfigError

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
    "control_plane_api_keys": _LOOPBACK,
    "jwt_issuer": _LOOPBACK,
    "tls_cert_path": _LOOPBACK,
    "tls_key_path": _LOOPBACK,
}
"""Arguments that the job sets or rules out itself → what to do instead; some are of one router only."""


@dataclass(frozen=True, slots=True)
class RouterArgument:
    """One argument of a router."""

    name: str
    """Name of the option, with underscores."""
    kind: str
    """`bool` for a switch, `int`, `float` or `str`; empty for a parser of the router's own."""
    many: bool
    """Takes a list."""
    choices: tuple[str, ...] | None
    """Values that it takes, where they are listed literally."""
    aliases: tuple[str, ...]


@cache
def router_arguments(package: str) -> Mapping[str, RouterArgument]:
    """All arguments that the installed router takes on its command line, by name. Raises ConfigError."""
    path = _source(package)
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError) as error:
        raise ConfigError(f"{PREFIX}: cannot read the router's argument list: {path}: {error}") from error
    lists = _constants(tree)
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    arguments = {argument.name: argument for call in calls if (argument := _argument(call, lists)) is not None}
    if "policy" not in arguments:
        raise ConfigError(f"{PREFIX}: cannot read the router's argument list in {path}; run {INSTALL[package]}")
    return arguments


def router_problems(config: RouterConfig) -> list[Problem]:
    """What the router would refuse or could not do."""
    if find_spec(MODULES[config.package]) is None:
        return [Problem("router.package", f"{config.package} is not installed; run {INSTALL[config.package]}")]
    return [*_policy_problems(config), *_argument_problems(config)]


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


def _argument_problems(config: RouterConfig) -> Iterator[Problem]:
    if not config.args:
        return
    known = router_arguments(config.package)
    alias_of = {alias: argument.name for argument in known.values() for alias in argument.aliases}
    for given, value in config.args.items():
        key = f"{PREFIX}.{given}"
        name = alias_of.get(given, given)
        if name not in known:
            names = nearest(given, sorted({*known, *alias_of} - set(RESERVED)))
            hint = did_you_mean(f"{PREFIX}.{near}" for near in names)
            yield Problem(key, f"{config.package} has no such argument{hint}")
        elif name in RESERVED:
            yield Problem(key, f"cannot be passed through: {RESERVED[name]}")
        elif (expected := _refusal(known[name], value)) is not None:
            yield Problem(key, f"{shown(given, value)} is not allowed; the router expects {expected}")


def _source(package: str) -> Path:
    spec = find_spec(MODULES[package])
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"router.package: {package} is not installed; run {INSTALL[package]}")
    return Path(spec.submodule_search_locations[0]) / "router_args.py"


def _constants(tree: ast.Module) -> Mapping[str, list[str]]:
    """Lists of strings at the top of the module, by name; one may unpack an earlier one."""
    found: dict[str, list[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            values = _strings(node.value, found)
            if values is not None:
                found[node.targets[0].id] = values
    return found


def _strings(node: ast.expr | None, known: Mapping[str, list[str]]) -> list[str] | None:
    """The strings of a literal list or a named one; None where they are computed."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if not isinstance(node, ast.List):
        return None
    values: list[str] = []
    for element in node.elts:
        if isinstance(element, ast.Constant) and isinstance(element.value, str):
            values.append(element.value)
        elif isinstance(element, ast.Starred) and (inner := _strings(element.value, known)) is not None:
            values += inner
        else:
            return None
    return values


def _argument(call: ast.Call, lists: Mapping[str, list[str]]) -> RouterArgument | None:
    """Reads `group.add_argument("--x", f"--{prefix}y", type=int, ...)`; None for any other call."""
    if not (isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"):
        return None
    names = [name for name in map(_option, call.args) if name is not None]
    if not names:
        return None
    settings = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    action = ast.unparse(settings["action"]) if "action" in settings else ""
    given = settings.get("type")
    kind = given.id if isinstance(given, ast.Name) else "str"
    if "store_true" in action or "store_false" in action or "BooleanOptionalAction" in action:
        kind = "bool"
    elif kind == "_non_negative_int":
        kind = "int"
    choices = _strings(settings.get("choices"), lists)
    return RouterArgument(
        name=names[0],
        kind=kind if kind in _IN_WORDS else "",
        many="nargs" in settings or "append" in action or "extend" in action,
        choices=None if choices is None else tuple(choices),
        aliases=tuple(names[1:]),
    )


def _option(node: ast.expr) -> str | None:
    """`"--x-y"` and `f"--{prefix}x-y"` → x_y; a literal prefix is for launchers that the router is a part of."""
    parts: Sequence[ast.expr] = node.values if isinstance(node, ast.JoinedStr) else [node]
    text = "".join(part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str))
    embedded = isinstance(node, ast.Constant) and text.startswith("--router-")
    return text.removeprefix("--").replace("-", "_") if text.startswith("--") and not embedded else None


_TYPES: Mapping[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str, int, float)}
_IN_WORDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text"}


def _refusal(argument: RouterArgument, value: Any) -> str | None:
    """What the router expects instead of `value`, or None where it may take it."""
    if argument.many:
        listed = isinstance(value, list | tuple) and value and all(_refusal_of_one(argument, v) is None for v in value)
        return None if listed else "a list"
    return _refusal_of_one(argument, value)


def _refusal_of_one(argument: RouterArgument, value: Any) -> str | None:
    if argument.choices is not None:
        return None if value in argument.choices else "one of " + ", ".join(argument.choices)
    if argument.kind == "bool":
        return None if isinstance(value, bool) else _IN_WORDS["bool"]
    if argument.kind in _TYPES:
        fits = isinstance(value, _TYPES[argument.kind]) and not isinstance(value, bool)
        return None if fits else _IN_WORDS[argument.kind]
    return None if isinstance(value, str | int | float) else "a text"
