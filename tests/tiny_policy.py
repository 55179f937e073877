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
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN_THINKING = """{%- for m in messages %}
{%- if m.role in ('system', 'user') %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
    {%- set content = m.content.split('</think>')[-1].lstrip('\n') %}
    {%- if loop.last %}{%- set content = '<think>\n\n</think>\n\n' + content %}{%- endif %}
    {{- '<|im_start|>assistant\n' + content }}
    {%- for call in m.tool_calls %}
        {{- '<tool_call>' + (call.function.name if call.function else call.name) + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}{{- '<|im_start|>user\n<tool_response>' + m.content + '</tool_response><|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<think>\n{% endif %}"
)
"""Templates in the style of ChatML, Llama 3, Qwen 3 and Mistral (here with a header that begins to think)."""


def write_policy(
    path: Path,
    *,
    chat_template: str | None = None,
    vocab_size: int = 64,
    context_length: int = 64,
    config: dict[str, Any] | None = None,
    generation_config: dict[str, Any] | None = None,
    bos: bool = False,
    eos: bool = False,
    special: tuple[str, ...] = (),
) -> Path:
    """One token per character; ids 0 to 3 are special (2 is the tokenizer's EOS), and so are the last, `special`.

    `bos` and `eos` have the tokenizer put these around a text.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS, *special])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    if bos:
        single = "<bos> $A <eos>" if eos else "<bos> $A"
        ends = [("<bos>", 1), ("<eos>", 2)]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ends)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        additional_special_tokens=["<|end|>", *special],
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
