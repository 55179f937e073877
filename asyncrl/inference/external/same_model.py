"""Whether an external engine serves the model of the job, asked before anything is written into it.

The engine names its architecture. Where its model's directory can be read from here, the shapes and the vocabulary in
its `config.json` are compared too. (The engine itself tells neither.)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncrl.inference.sglang.engine_api import ModelInfo, ServerInfo

_COMPARED = (
    *("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings"),
)


def difference(own: Path, info: ModelInfo, server: ServerInfo) -> str | None:
    """`vocab_size is 151936 there and 50304 here`; None where nothing is known to differ. Blocks on the disk."""
    here = _facts(own)
    there = {"architectures": info.architectures, "model_type": info.model_type}
    if server.model_path is not None:
        there |= _facts(Path(server.model_path))
    differing = [
        f"{key} is {there[key]} there and {here[key]} here"
        for key in _COMPARED
        if here.get(key) is not None and there.get(key) is not None and here[key] != there[key]
    ]
    return ", ".join(differing) or None


def _facts(directory: Path) -> dict[str, Any]:
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(config, dict):
        return {}
    nested = config.get("text_config")
    return {**(nested if isinstance(nested, dict) else {}), **config}
