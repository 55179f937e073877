"""Where prompts come from and how they become token ids."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from asyncrl.config.sections.base import Section


class DataConfig(Section):
    """One source of prompts."""

    source: str = ""
    """A file (.jsonl, .json, .csv, each also .gz, or .parquet), a Hugging Face dataset directory or any directory of
    such files, `reasoning_gym:TASK`, or a dotted path `package.module:function` that returns an iterable of dicts."""

    split: str | None = None
    """Split of a Hugging Face dataset directory; none takes `train`, or the only one."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a reasoning_gym task or of the dotted function (for example {max_terms = 2})."""

    size: int | None = Field(default=None, ge=1)
    """Number of prompts to take (or, for generated tasks, to make); none takes all that the source
    has: everything is read before the first step, so a function must end by itself."""

    seed: int = 0
    """Seed of the shuffle and of generated tasks."""

    shuffle: bool = True
    """Shuffle anew in each epoch, reproducibly from the seed."""

    prompt_key: str = "prompt"
    """Field that holds the prompt: a string, or a list of chat messages. The response continues a last message of the
    assistant. A path reaches into nested fields and lists: `extra.messages`, `turns.0.text`."""

    answer_key: str | None = "answer"
    """Field that holds the reference answer for the reward (a path as above: `reward_model.ground_truth`); none: the
    records have no answers."""

    answer_after: str | None = None
    """Takes as the answer what follows the last occurrence of this text, without the commas of a number (`####` for
    GSM8K); none takes the whole field."""

    chat_template: bool | Literal["auto"] = "auto"
    """Render prompts with the tokenizer's chat template; auto does so when the tokenizer has one."""

    chat_template_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the chat template (for example {enable_thinking = false})."""

    system_prompt: str | None = None
    """System message put before each prompt that has none of its own, when a chat template is used."""

    control_tokens: Literal["warn", "error", "allow"] = "warn"
    """A user's text that holds a special token of the tokenizer (`<|im_end|>`) becomes that token in the prompt: count
    such prompts and warn of them once, refuse them, or keep quiet."""

    overlong: Literal["drop", "error"] = "drop"
    """What to do with a prompt that leaves no room for the response: drop and count it, or stop."""
