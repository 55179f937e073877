"""The base of all sections: frozen, refuses unknown keys, and makes the docstrings of fields the help."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    """A frozen part of the configuration."""

    @field_validator("*", mode="before")
    @classmethod
    def _is_place(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuses an empty path, which would mean the current directory, and expands `~` as a shell does."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        is_path = Path in (annotation, *get_args(annotation))
        if is_path and value == "":
            raise ValueError("must not be empty")
        if isinstance(value, str) and (is_path or info.field_name == "source") and value.startswith("~"):
            return os.path.expanduser(value)
        return value

    @field_validator("*")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        """Refuses a NUL: any string may become a path, or an argument or a variable of a process, which hold none."""
        if any("\0" in text for text in _texts(value)):
            raise ValueError("must not hold a NUL character")
        return value

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


def _texts(value: Any) -> Iterator[str]:
    """Every string in a value, at any depth, with the names in tables."""
    if isinstance(value, str | Path):
        yield str(value)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield str(name)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
