"""Writes the argument lists anew from the installed packages: `python -m asyncrl.config.arguments.make [PACKAGE ...]`.

Run it when a pinned version changes. It imports the packages, which takes SGLang 10 s.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from typing import Any

from asyncrl.config.arguments.argument_list import Kind, list_path

PARSERS: Mapping[str, tuple[str, str]] = {
    "sglang": ("sglang.srt.server_args", "ServerArgs"),
    "sglang-router": ("sglang_router.router_args", "RouterArgs"),
    "smg": ("smg.router_args", "RouterArgs"),
}
"""Package → module and class whose `add_cli_args` fills the parser of its command line."""

_KINDS: Mapping[str, Kind] = {"str": "str", "int": "int", "float": "float", "_non_negative_int": "int"}
"""Parsers of values by name → the kind of value that they take. An argument with another parser is of kind `any`."""
_PLAIN_ACTIONS = ("_StoreAction", "_AppendAction", "_ExtendAction")


def listed(package: str) -> dict[str, Any]:
    """The content of the package's file, from the installed package. Raises ImportError where it is not installed."""
    module, name = PARSERS[package]
    parser = argparse.ArgumentParser(add_help=False)
    getattr(import_module(module), name).add_cli_args(parser)
    arguments = dict(_described(action) for action in parser._actions if _names(action))
    return {"package": package, "version": version(package), "arguments": dict(sorted(arguments.items()))}


def as_text(content: Mapping[str, Any]) -> str:
    """The file's text: one line for each argument."""
    head = "".join(f"  {json.dumps(name)}: {json.dumps(content[name])},\n" for name in ("package", "version"))
    rows = ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in content["arguments"].items())
    return f'{{\n{head}  "arguments": {{\n{rows}\n  }}\n}}\n'


def _names(action: argparse.Action) -> list[str]:
    """Names of an option, with underscores; the first one is its own."""
    return [option.removeprefix("--").replace("-", "_") for option in action.option_strings if option.startswith("--")]


def _described(action: argparse.Action) -> tuple[str, dict[str, Any]]:
    """An option's name and the fields of its `Argument` that are not at their defaults."""
    name, *aliases = _names(action)
    kind = _kind(action)
    row: dict[str, Any] = {"kind": kind}
    if action.nargs in ("*", "+") or (isinstance(action.nargs, int) and action.nargs > 0):
        row["many"] = True
    if action.choices is not None and kind != "any":  # a parser may turn other texts into these values
        # Routers list their parsers out of a hash map, in another order each time.
        in_order = isinstance(action.choices, list | tuple) and not name.endswith("_parser")
        choices = action.choices if in_order else sorted(action.choices)
        row["choices"] = [choice for choice in choices if choice is not None]
    if isinstance(action, argparse.BooleanOptionalAction):
        row["negatable"] = True
        aliases = [alias for alias in aliases if not alias.startswith("no_")]
    if aliases:
        row["aliases"] = aliases
    return name, row


def _kind(action: argparse.Action) -> Kind:
    if action.nargs == 0:
        return "switch"
    if type(action).__name__ not in _PLAIN_ACTIONS:
        return "any"
    return "str" if action.type is None else _KINDS.get(getattr(action.type, "__name__", ""), "any")


if __name__ == "__main__":
    for package in sys.argv[1:] or PARSERS:
        list_path(package).write_text(as_text(listed(package)), encoding="utf-8")
        print(f"wrote {list_path(package)}")
