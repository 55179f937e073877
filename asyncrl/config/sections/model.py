"""The model that is trained, and the numbers that it is computed with."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from asyncrl.config.sections.base import Section


class ModelConfig(Section):
    """The policy: a local Hugging Face directory."""

    path: Path = Path("runs/demo-model")
    """Hugging Face directory of the policy (config.json, tokenizer, safetensors)."""

    builder: str | None = None
    """Dotted path `package.module:function` called with `path` to create the model where it does not exist."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The numbers that trainer and engines compute with; auto: float32 on CPU, bfloat16 on GPU."""

    context_length: int | None = Field(default=None, ge=2)
    """Longest prompt + response in tokens; none: the model's own limit."""
