"""The configuration's fields as a flat table: dotted key, type in words, default, help.

The command line, the help, the search for the nearest key and the documentation all read this table, so that a field is
described once, where it is declared.
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
"""Stands in a path for the name that the user gives to a section."""

KeyPath = tuple[str, ...]
"""A dotted key in parts. The parts below a table are the table's own keys, and may hold dots."""


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One key of the configuration."""

    path: KeyPath
    kind: Literal["section", "sections", "table", "list", "scalar"]
    """A section holds fields. `sections` holds sections under names that the user chooses. A table (server_args, args)
    holds keys that the user chooses."""
    nullable: bool
    """Takes `none`."""
    accepts: tuple[Any, ...]
    """Member types of a scalar, element types of a list, value types of a table. A literal stands as its value."""
    expects: str
    """The type in words: `whole number, at least 1, or none`."""
    default: Any
    help: str

    @property
    def key(self) -> str:
        """The dotted key, with underscores."""
        return ".".join(self.path)

    @property
    def option(self) -> str:
        """The option on the command line, with dashes."""
        return "--" + self.key.replace("_", "-")

    def takes(self, kind: type) -> bool:
        """Whether the field takes a value of exactly this type."""
        return Any in self.accepts or kind in self.accepts or any(type(member) is kind for member in self.accepts)


@cache
def fields() -> Mapping[KeyPath, FieldSpec]:
    """Every key of the configuration in the order of declaration, sections included."""
    return {spec.path: spec for spec in _walk((), Config)}


def spec_of(path: KeyPath) -> FieldSpec | None:
    """The field at `path`, also in a section that the user named; None where there is none."""
    known = fields().get(path)
    if known is None and len(path) > 1 and (named := fields().get(path[:1])) is not None and named.kind == "sections":
        known = fields().get((path[0], ANY_NAME, *path[2:]))
    return None if known is None else replace(known, path=path)


def settable_keys() -> list[str]:
    """Dotted keys of all fields that take a value of their own."""
    return [spec.key for spec in fields().values() if spec.kind not in ("section", "sections") or spec.nullable]


def table_of(path: KeyPath) -> FieldSpec | None:
    """The table that holds the entry at `path`; None where `path` is no entry of a table."""
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
    """Member types of a union. A Literal is replaced by its values."""
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
    """Members in words, values of a literal in quotes: `true or false or "auto"`."""
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
