"""The arguments that the engine and the routers take: what a configuration may pass on to their command lines.

The lists are the JSON files beside this module. `make.py` writes them from the packages' own parsers, and a test
compares them with those of the installed packages.

Invariants
- Nothing here imports an engine or a router: SGLang takes 10 s and torch, a router is a shared library of 90 MB.
- What passes `argument_problems` is accepted by the command line of the version that the list was made for, as far as
  names, types and listed choices tell. (A plugin of SGLang may add choices while it runs. The lists do not have those.)
- For another installed version, only arguments that the job sets itself are refused. All others pass unchecked, and
  `unchecked_warning` says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from asyncrl.config.nearest import did_you_mean, nearest
from asyncrl.config.problems import Problem
from asyncrl.config.reading.redaction import shown

Kind = Literal["switch", "int", "float", "str", "any"]


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a command line."""

    kind: Kind
    """What one value must be. `any`: the package has a parser of its own for it (JSON, `64k`)."""
    many: bool = False
    """Takes a list."""
    choices: tuple[str | int, ...] | None = None
    """All values that it takes; None where any value of its kind will do."""
    negatable: bool = False
    """A switch whose false is `--no-NAME`. For other switches, false leaves the argument out."""
    aliases: tuple[str, ...] = ()
    """Other names of it, with underscores."""


@dataclass(frozen=True, slots=True)
class ArgumentList:
    """All arguments of one package."""

    package: str
    """Name of the distribution, as pip knows it."""
    version: str
    """The version that the list was made for."""
    arguments: Mapping[str, Argument]
    """By name, with underscores."""

    @property
    def other_version(self) -> str | None:
        """The installed version, where it is not the one that the list was made for."""
        installed = _installed_version(self.package)
        return None if installed in (None, self.version) else installed


@cache
def argument_list(package: str) -> ArgumentList:
    """The list of `sglang`, `sglang-router` or `smg`."""
    return TypeAdapter(ArgumentList).validate_json(list_path(package).read_bytes())


def list_path(package: str) -> Path:
    """The file that holds a package's list."""
    return Path(__file__).parent / f"{package}.json"


def argument_problems(
    given: Mapping[str, Any],
    package: str,
    *,
    key: str,
    reserved: Mapping[str, str],
    taker: str,
    unknown: str,
) -> Iterator[Problem]:
    """What is wrong with the arguments that the setting `key` passes on to `package`.

    `reserved`: arguments that the job sets or rules out itself → what the user should do instead.
    `taker` names the receiver in messages (`the engine`), and `unknown` says that it has no such argument.
    """
    if not given:
        return
    known = argument_list(package)
    checked = known.other_version is None
    alias_of = {alias: name for name, argument in known.arguments.items() for alias in argument.aliases}
    for written, value in given.items():
        at, name = f"{key}.{written}", alias_of.get(written, written)
        argument = known.arguments.get(name)
        if name in reserved and (argument is not None or not checked):
            yield Problem(at, f"cannot be passed through: {reserved[name]}")
        elif not checked:
            continue
        elif argument is None:
            names = nearest(written, sorted({*known.arguments, *alias_of} - set(reserved)))
            yield Problem(at, unknown + did_you_mean(f"{key}.{near}" for near in names))
        elif (expected := _expected_instead(argument, value)) is not None:
            yield Problem(at, f"{shown(written, value)} is not allowed; {taker} expects {expected}")


def unchecked_warning(keys: Iterable[str], package: str) -> str | None:
    """Says that the arguments under `keys` were passed on to `package` unchecked; None where they were checked."""
    known = argument_list(package)
    other = known.other_version
    if other is None:
        return None
    return (
        f"{', '.join(keys)}: passed on unchecked, since {package} {other} is installed and the arguments that asyncrl "
        f"knows are those of {known.version}"
    )


def _installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


_TYPES: Mapping[Kind, tuple[type, ...]] = {
    "switch": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str, int, float, dict),  # a table becomes JSON
}
_IN_WORDS: Mapping[Kind, str] = {
    "switch": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
}


def _expected_instead(argument: Argument, value: Any) -> str | None:
    """What the command line expects in place of `value`; None where it may take `value`."""
    if argument.kind == "any":
        return None
    one = "one of " + ", ".join(map(str, argument.choices)) if argument.choices else _IN_WORDS[argument.kind]
    if argument.many and (isinstance(value, list | tuple) or not argument.choices):
        fits = isinstance(value, list | tuple) and value and all(_fits(argument, item) for item in value)
        return None if fits else f"a list, each item {one}"
    return None if _fits(argument, value) else one


def _fits(argument: Argument, value: Any) -> bool:
    """Whether `value` can be one value of `argument`."""
    if isinstance(value, bool) and argument.kind != "switch":  # Python's true is also the number 1
        return False
    return value in argument.choices if argument.choices else isinstance(value, _TYPES[argument.kind])
