"""What every section shares: frozen, unknown keys refused, docstrings of fields become help."""

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
        """A path is not empty (that would mean the current directory), and `~` is the user's home, as in a shell."""
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
        """Every string may come to be a path, an argument or a variable of a process; none of these can hold a NUL."""
        if any("\0" in text for text in _texts(value)):
            raise ValueError("must not hold a NUL character")
        return value

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


def _texts(value: Any) -> Iterator[str]:
    """Every string in a value, at any depth, the names of a table included."""
    if isinstance(value, str | Path):
        yield str(value)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield str(name)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
