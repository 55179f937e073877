"""A Hugging Face directory without weights: config.json and a character tokenizer, for tests of data and rollouts."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

CHARACTERS = string.ascii_lowercase + string.digits + " +-=?.\n"
SPECIAL = ("<pad>", "<bos>", "<eos>", "<|end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + '=' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a={% endif %}"
)


def write_policy(
    path: Path,
    *,
    chat_template: str | None = None,
    vocab_size: int = 64,
    context_length: int = 64,
    config: dict[str, Any] | None = None,
    generation_config: dict[str, Any] | None = None,
    bos: bool = False,
) -> Path:
    """One token per character; ids 0 to 3 are special (2 is the tokenizer's EOS)."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        additional_special_tokens=["<|end|>"],
    )
    fast.chat_template = chat_template
    path.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(path)
    model = {
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "max_position_embeddings": context_length,
        "eos_token_id": 2,
    }
    (path / "config.json").write_text(json.dumps(model | (config or {})))
    if generation_config is not None:
        (path / "generation_config.json").write_text(json.dumps(generation_config))
    return path
