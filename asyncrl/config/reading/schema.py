"""The configuration's fields as a flat table: dotted key, type in words, default, help.

Everything that lists fields (command line, help, nearest-key search, documentation) reads this table, so that a field
is described once, where it is declared.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from asyncrl.config.root import Config

ANY_NAME = "NAME"
"""Stands in a path for the name that a user gives a section."""

KeyPath = tuple[str, ...]
"""A dotted key in parts; the parts below a table are the table's own keys and may hold dots."""


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One key of the configuration."""

    path: KeyPath
    kind: Literal["section", "sections", "table", "list", "scalar"]
    """A section holds fields; sections are such under names of the user's choosing; a table (server_args, args) holds
    keys of the user's choosing."""
    nullable: bool
    """Takes `none`."""
    accepts: tuple[Any, ...]
    """Member types of a scalar, element types of a list, value types of a table; literals as their values."""
    expects: str
    """The type in words: `whole number, at least 1, or none`."""
    default: Any
    help: str

    @property
    def key(self) -> str:
        return ".".join(self.path)

    @property
    def option(self) -> str:
        """The option on the command line, with dashes."""
        return "--" + self.key.replace("_", "-")

    def takes(self, kind: type) -> bool:
        """Whether a value of exactly this type may stand here."""
        return Any in self.accepts or kind in self.accepts or any(type(member) is kind for member in self.accepts)


@cache
def fields() -> Mapping[KeyPath, FieldSpec]:
    """Every key of the configuration in the order of declaration, sections included."""
    return {spec.path: spec for spec in _walk((), Config)}


def spec_of(path: KeyPath) -> FieldSpec | None:
    """The key at `path`, also below a section that the user named; None where there is none."""
    known = fields().get(path)
    if known is None and len(path) > 1 and (named := fields().get(path[:1])) is not None and named.kind == "sections":
        known = fields().get((path[0], ANY_NAME, *path[2:]))
    return None if known is None else replace(known, path=path)


def settable_keys() -> list[str]:
    """Dotted keys of everything that takes a value of its own."""
    return [spec.key for spec in fields().values() if spec.kind not in ("section", "sections") or spec.nullable]


def table_of(path: KeyPath) -> FieldSpec | None:
    """The table that `path` is an entry of."""
    for length in range(1, len(path)):
        spec = spec_of(path[:length])
        if spec is not None and spec.kind == "table":
            return spec
    return None


def _walk(prefix: KeyPath, model: type[BaseModel]) -> Iterator[FieldSpec]:
    for name, info in model.model_fields.items():
        path = (*prefix, name)
        members = _members(info.annotation)
        nullable = type(None) in members
        inner = tuple(member for member in members if member is not type(None))
        only = inner[0]
        text = " ".join((info.description or "").split())
        if _is_section(only):
            yield from _section(path, only, nullable=nullable, text=text)
            continue
        default = info.get_default(call_default_factory=True)
        if get_origin(only) is dict and _is_section(get_args(only)[1]):
            yield FieldSpec(path, "sections", False, (), "sections, each under its name", {}, text)
            yield from _section((*path, ANY_NAME), get_args(only)[1], nullable=False, text="")
        elif get_origin(only) is dict:
            accepts = _members(get_args(only)[1])
            words = "a table" if accepts == (Any,) else f"a table of {_in_words(accepts)}"
            yield FieldSpec(path, "table", nullable, accepts, words + _or_none(nullable), default, text)
        elif get_origin(only) is tuple:
            accepts = _members(get_args(only)[0])
            words = f"a list of {_in_words(accepts)}s"
            yield FieldSpec(path, "list", nullable, accepts, words + _or_none(nullable), default, text)
        else:
            words = _in_words(inner) + _bounds(info)
            yield FieldSpec(path, "scalar", nullable, inner, words + _or_none(nullable), default, text)


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _section(path: KeyPath, model: type[BaseModel], *, nullable: bool, text: str) -> Iterator[FieldSpec]:
    own = " ".join((model.__doc__ or "").split())
    missing: dict[str, Any] | None = None if nullable else {}
    yield FieldSpec(path, "section", nullable, (), "a table" + _or_none(nullable), missing, text or own)
    yield from _walk(path, model)


def _members(annotation: Any) -> tuple[Any, ...]:
    """Member types of a union, with the values of literals in place of the Literal."""
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(member for part in get_args(annotation) for member in _members(part))
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return (annotation,)


_WORDS: Mapping[Any, str] = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true or false",
    Path: "path",
    Any: "value",
}


def _in_words(members: tuple[Any, ...]) -> str:
    """`true or false or "auto"`; values of a literal in quotes."""
    return " or ".join(_WORDS.get(member, f'"{member}"') for member in members)


def _bounds(info: FieldInfo) -> str:
    words = ""
    for bound in info.metadata:
        if isinstance(bound, annotated_types.Ge):
            words += f", at least {bound.ge}"
        elif isinstance(bound, annotated_types.Gt):
            words += f", over {bound.gt}"
        elif isinstance(bound, annotated_types.Le):
            words += f", at most {bound.le}"
        elif isinstance(bound, annotated_types.Lt):
            words += f", under {bound.lt}"
    return words


def _or_none(nullable: bool) -> str:
    return ", or none" if nullable else ""
