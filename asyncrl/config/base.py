"""What every section shares: frozen, unknown keys refused, docstrings of fields become help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator


class Section(BaseModel):
    """A frozen part of the configuration."""

    @field_validator("*")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        """Every string may come to be a path, an argument or a variable of a process; none of these can hold a NUL."""
        texts = value if isinstance(value, tuple) else value.values() if isinstance(value, dict) else (value,)
        if any(isinstance(text, str | Path) and "\0" in str(text) for text in texts):
            raise ValueError("must not hold a NUL character")
        return value

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
