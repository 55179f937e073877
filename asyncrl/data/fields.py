"""Records and their fields, which are reached by name, or by a path into nested objects and lists. Pure.

A key is the name of a field (`answer`), or a path of names and list indexes with dots between them
(`reward_model.ground_truth`, `messages.0.content`; -1 is the last of a list). A field whose own name has dots is found
by its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.config.nearest import did_you_mean
from asyncrl.errors import DataError

_SUGGESTED = 3  # paths in a message


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a source."""

    record_id: str
    """Stable, and unique within the source: `train.jsonl:17`."""
    place: str
    """Where the record is, for messages: `data/train.jsonl line 17`."""
    fields: dict[str, Any]
    """Values by field name, as the source has them."""


def required_field(record: Record, key: str, where: str, setting: str) -> Any:
    """Returns the value of the field `key`, which the setting `setting` names.

    Raises DataError, which says what there is in its place, where the field is missing.
    """
    if key in record.fields:
        return record.fields[key]
    value: Any = record.fields
    reached: list[str] = []
    for part in key.split("."):
        inside = _inside(value, part)
        if inside is None:
            found = _names(value)
            at = f" in {'.'.join(reached)}" if reached else ""
            hint = did_you_mean(_paths_to(record.fields, key)) or f"; set {setting}"
            raise DataError(f'{where}: {record.place}: field "{key}" is missing (found{at}: {found}){hint}')
        (value,) = inside
        reached.append(part)
    return value


def _inside(value: Any, part: str) -> tuple[Any] | None:
    """The value at one part of a path, as a tuple of one; None where there is none."""
    if isinstance(value, Mapping):
        return (value[part],) if part in value else None
    if isinstance(value, list | tuple) and part.removeprefix("-").isdecimal():
        index = int(part)
        return (value[index],) if -len(value) <= index < len(value) else None
    return None


def _names(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(map(str, value)) or "nothing"
    return f"a list of {len(value)}" if isinstance(value, list | tuple) else type(value).__name__


def _paths_to(fields: Mapping[str, Any], name: str) -> list[str]:
    """Paths of nested fields with this name."""

    def paths(value: Any, before: str) -> Iterator[str]:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                if key == name and before:
                    yield before + key
                yield from paths(inner, f"{before}{key}.")

    return [path for _, path in zip(range(_SUGGESTED), paths(fields, ""), strict=False)]
