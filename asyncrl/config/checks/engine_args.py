"""The engine's own argument list, read from the installed SGLang's source without importing it.

Importing SGLang costs 12 s and torch; its arguments are declared as annotated fields in
`sglang/srt/arg_groups/fields/*.py`, and parsing those takes a tenth of a second.

Invariant: what passes `server_arg_problems` is accepted by the engine's own command line, as far as names, types and
listed choices tell. (A plugin of SGLang's may add choices as it runs; those are not known here.)
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from asyncrl.config.nearest import did_you_mean, nearest
from asyncrl.config.problems import Problem
from asyncrl.config.reading.redaction import shown
from asyncrl.errors import ConfigError

PREFIX = "engine.server_args"

_JOB_PORTS = "the job picks free ports itself; leave it out"
_HTTP_ONLY = "the job speaks HTTP to its engines; leave it out"
_ONE_NODE = "an engine runs on one node; leave it out"
_TENSOR_PARALLEL_ONLY = (
    "new weights reach tensor-parallel ranks only; for more replicas use engine.num_engines, for larger ones "
    "engine.tensor_parallel"
)
_LOOPBACK = "the servers of a job speak plain HTTP on loopback; leave it out"

RESERVED: Mapping[str, str] = {
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
    "api_key": _LOOPBACK,
    "admin_api_key": _LOOPBACK,
    "ssl_keyfile": _LOOPBACK,
    "ssl_certfile": _LOOPBACK,
}
"""Arguments that the job sets or rules out itself → what to do instead."""


_OWN = re.compile(r"engine\.(?=tensor_parallel|num_engines|gpus|max_)|model\.(?=path|context_length)")
"""Settings that other engines have in their own section."""


@dataclass(frozen=True, slots=True)
class EngineArgument:
    """One argument of the engine."""

    name: str
    """Field name, with underscores."""
    annotation: str
    """Its type as written in SGLang's source: `Optional[int]`."""
    choices: tuple[Any, ...] | None
    """Values that it takes, where they are listed literally or by the name of a list in `choices.py`."""
    parsed: bool
    """Its text goes through a parser of SGLang's own (JSON, `64k`), so any scalar or table may be meant."""
    negatable: bool
    """A switch whose false is `--no-NAME`; of other switches false is to leave them out."""
    aliases: tuple[str, ...]
    """Other spellings, as field names."""


@cache
def engine_arguments() -> Mapping[str, EngineArgument]:
    """All arguments that the installed engine takes on its command line, by field name. Raises ConfigError."""
    root = _sglang_source()
    by_hand = _options_registered_by_hand(root / "server_args.py")
    named = _named_choices(root / "arg_groups" / "choices.py")
    arguments: dict[str, EngineArgument] = {}
    for path in sorted((root / "arg_groups" / "fields").glob("*.py")):
        for node in ast.walk(_parsed(path)):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                argument = _argument(node.target.id, node.annotation, by_hand, named)
                if argument is not None:
                    arguments[argument.name] = argument
    if "model_path" not in arguments:
        raise ConfigError(f"{PREFIX}: cannot read the engine's argument list in {root}; is sglang 0.5.23 installed?")
    return arguments


def server_arg_problems(server_args: Mapping[str, Any], section: str = "engine") -> list[Problem]:
    """What the engine would refuse, and what the job sets itself; they are those of the engines in `section`."""
    if not server_args:
        return []
    known = engine_arguments()
    alias_of = {alias: argument.name for argument in known.values() for alias in argument.aliases}
    problems = []
    for given, value in server_args.items():
        key = f"{section}.server_args.{given}"
        name = alias_of.get(given, given)
        if name in RESERVED:
            reason = RESERVED[name] if section == "engine" else _OWN.sub(f"{section}.", RESERVED[name])
            problems.append(Problem(key, f"cannot be passed through: {reason}"))
        elif name not in known:
            names = nearest(given, sorted({*known, *alias_of} - set(RESERVED)))
            hint = did_you_mean(f"{section}.server_args.{near}" for near in names)
            problems.append(Problem(key, f"SGLang has no such server argument{hint}"))
        elif (expected := _refusal(known[name], value)) is not None:
            problems.append(Problem(key, f"{shown(given, value)} is not allowed; the engine expects {expected}"))
    return problems


def _sglang_source() -> Path:
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"{PREFIX}: cannot be checked, since sglang is not installed; run pip install sglang==0.5.23")
    return Path(spec.submodule_search_locations[0]) / "srt"


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError) as error:
        raise ConfigError(f"{PREFIX}: cannot read the engine's argument list: {path}: {error}") from error


def _options_registered_by_hand(path: Path) -> set[str]:
    """Field names of options that SGLang adds with a plain `parser.add_argument("--x", ...)`."""
    return {
        node.args[0].value.removeprefix("--").replace("-", "_")
        for node in ast.walk(_parsed(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "add_argument"
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
    }


def _named_choices(path: Path) -> dict[str, list[Any]]:
    """Lists of choices by the names that they are used under."""
    lists = {}
    for node in _parsed(path).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = _literal(node.value)
            if isinstance(value, list):
                lists[node.targets[0].id] = value
    return lists


def _choices(node: ast.expr | None, named: Mapping[str, list[Any]]) -> list[Any] | None:
    """The choices that an expression stands for: a literal, the name of a list, a sum of these; None where unknown."""
    if isinstance(node, ast.Name):
        return named.get(node.id)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _choices(node.left, named), _choices(node.right, named)
        return None if left is None or right is None else left + right
    choices = _literal(node)
    return None if choices is None else list(choices)


def _argument(
    name: str, annotation: ast.expr, by_hand: set[str], named: Mapping[str, list[Any]]
) -> EngineArgument | None:
    """Reads `name: A[type, "help"]` or `A[type, Arg(...)]`; None for a field without an option."""
    wrapped = (
        isinstance(annotation, ast.Subscript)
        and isinstance(annotation.value, ast.Name)
        and annotation.value.id == "A"
        and isinstance(annotation.slice, ast.Tuple)
    )
    if not wrapped:
        return EngineArgument(name, ast.unparse(annotation), None, False, False, ()) if name in by_hand else None
    assert isinstance(annotation, ast.Subscript) and isinstance(annotation.slice, ast.Tuple)
    kind, described = annotation.slice.elts[:2]
    settings: dict[str, ast.expr] = {}
    if isinstance(described, ast.Call):
        if not (isinstance(described.func, ast.Name) and described.func.id == "Arg"):
            return None
        settings = {keyword.arg: keyword.value for keyword in described.keywords if keyword.arg}
    if "no_cli" in settings and name not in by_hand:
        return None
    # The engine's command line knows only the option's name, which a few fields do not share.
    option = _literal(settings.get("cli_name"))
    own_name = option.removeprefix("--").replace("-", "_") if isinstance(option, str) else name
    aliases = _literal(settings.get("aliases")) or []
    negatable = "action" in settings and "BooleanOptionalAction" in ast.unparse(settings["action"])
    choices = _choices(settings.get("choices"), named)
    if choices is None and "choices" not in settings:
        choices = _literal_type_values(kind)
    return EngineArgument(
        name=own_name,
        annotation=ast.unparse(kind),
        choices=None if choices is None else tuple(choices),
        parsed="type_parser" in settings or ("action" in settings and not negatable),
        negatable=negatable,
        aliases=tuple(alias.removeprefix("--").replace("-", "_") for alias in aliases),
    )


def _literal(node: ast.expr | None) -> Any:
    """The value of a literal; None where there is none or where it is computed."""
    if node is None:
        return None
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _literal_type_values(kind: ast.expr) -> list[Any] | None:
    """Values of `Literal[...]` or `Optional[Literal[...]]`."""
    for node in ast.walk(kind):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Literal":
            values = ast.literal_eval(node.slice)
            return list(values) if isinstance(values, tuple) else [values]
    return None


_SCALARS: Mapping[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str, int, float, dict)}
_IN_WORDS = {"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false"}


def _refusal(argument: EngineArgument, value: Any) -> str | None:
    """What the engine expects instead of `value`, or None where it may take it."""
    if argument.parsed:
        return None
    kind = _without_optional(argument.annotation)
    if argument.choices is not None and not isinstance(value, list):
        choices = [choice for choice in argument.choices if choice is not None]
        return None if value in choices else "one of " + ", ".join(map(str, choices))
    if kind == "bool":
        return None if isinstance(value, bool) else _IN_WORDS["bool"]
    if kind in _SCALARS:
        fits = isinstance(value, _SCALARS[kind]) and not isinstance(value, bool)
        return None if fits else _IN_WORDS[kind]
    if kind.startswith("List["):
        return None if isinstance(value, list) and value else "a list"
    return None


def _without_optional(annotation: str) -> str:
    return annotation[len("Optional[") : -1] if annotation.startswith("Optional[") else annotation
