"""The policy's tokenizer: text to ids and back, and the ids that end a response.

Invariants
- No id outside the model's vocabulary leaves this module. `vocab_size` comes from the model's config.json and may
  differ from the tokenizer's; an engine that gets a larger id dies.
- `stop_token_ids` is the one set of ids that end a response: all end tokens that the tokenizer,
  generation_config.json and config.json name, and the one with which the chat template ends the assistant's turn. Each
  request carries it, so engine and trainer always agree.
- Text is encoded after the tokens that the tokenizer puts before it (BOS), which are never there twice, and nothing is
  put after it.
- Only local files are read; nothing is downloaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.data.rendering.messages import Messages
from asyncrl.data.rendering.template import ChatTemplate
from asyncrl.errors import ConfigError, DataError, ModelError

_TOKENIZER_FILES = ("tokenizer.*", "vocab.*", "*.model", "*.tiktoken")


class PolicyTokenizer:
    """The part of a Hugging Face tokenizer that this project uses. Not safe for use from two threads at once."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        source: Path,
        vocab_size: int,
        context_length: int,
        eos_token_id: int | None,
        stop_token_ids: Sequence[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._prefix = _tokens_before_text(tokenizer)
        self._control_tokens = _control_tokens(tokenizer)
        self.template = ChatTemplate(tokenizer)
        """The chat template, which is false where the tokenizer has none."""
        self.source = source
        """Model directory."""
        self.vocab_size = vocab_size
        """Rows of the model's embedding: ids are in [0, vocab_size)."""
        self.context_length = context_length
        """Longest prompt + response, in tokens, that the model supports."""
        self.eos_token_id = eos_token_id
        """The end token that closes a response to plain text; None if the model has none."""
        self.turn_end_id = self._turn_end_id()
        """The end token that closes a response in a chat; None if the model has none."""
        ends = set(stop_token_ids) if self.turn_end_id is None else {*stop_token_ids, self.turn_end_id}
        self.stop_token_ids = tuple(sorted(ends))
        """All ids that end a response, ascending."""

    @classmethod
    def load(cls, path: Path) -> PolicyTokenizer:
        """Loads from a Hugging Face directory. Importing transformers takes seconds, so call it in a thread.

        Raises ModelError when the directory, config.json or the tokenizer is missing or unreadable.
        """
        if not path.is_dir():
            raise ModelError(f"model.path: {path} is not a directory; point it at a local Hugging Face model directory")
        config = _read_json(path / "config.json")
        if config is None:
            raise ModelError(f"model.path: {path} holds no config.json; it is not a Hugging Face model directory")
        vocab_size = config.get("vocab_size")
        context_length = config.get("max_position_embeddings")
        if not isinstance(vocab_size, int) or not isinstance(context_length, int):
            raise ModelError(f"model.path: {path}/config.json lacks vocab_size or max_position_embeddings")

        if not any(next(path.glob(pattern), None) for pattern in _TOKENIZER_FILES):
            # transformers would make an empty tokenizer without an error
            raise ModelError(
                f"model.path: {path} holds no tokenizer (tokenizer.json, tokenizer.model, vocab.json, ...)"
            )

        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except Exception as error:  # transformers raises OSError, ValueError, ImportError or KeyError here
            first_line = str(error).strip().partition("\n")[0]
            raise ModelError(f"model.path: no tokenizer could be loaded from {path}: {first_line}") from error
        generation = _read_json(path / "generation_config.json") or {}
        ends = [
            *_as_ids(tokenizer.eos_token_id),
            *_as_ids(generation.get("eos_token_id")),
            *_as_ids(config.get("eos_token_id")),
        ]
        ends = [token for token in ends if 0 <= token < vocab_size]
        return cls(
            tokenizer,
            source=path,
            vocab_size=vocab_size,
            context_length=context_length,
            eos_token_id=ends[0] if ends else None,
            stop_token_ids=sorted(set(ends)),
        )

    def uses_chat_template(self, setting: bool | Literal["auto"]) -> bool:
        """Resolves `data.chat_template`; raises ConfigError for True without a template."""
        if setting is True and not self.template:
            raise ConfigError(f"data.chat_template is true, but the tokenizer in {self.source} has no chat template")
        return bool(self.template) if setting == "auto" else setting

    def render_chat(self, messages: Messages, arguments: Mapping[str, Any] | None = None) -> str:
        """Renders a conversation as text that a response continues; `arguments` are for the chat template.

        Raises DataError where the template refuses the messages.
        """
        return self.template.render(messages, arguments or {})

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[NDArray[np.int32]]:
        """Returns the ids of each text, int32 [tokens].

        `add_special_tokens` puts the tokens before plain text (BOS) that the tokenizer puts there, unless the text
        begins with them; rendered chats have them already. Raises DataError for an id that the model's embedding does
        not hold.
        """
        if not texts:
            return []
        rows = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        prefix = self._prefix if add_special_tokens else []
        encoded: list[NDArray[np.int32]] = []
        for text, row in zip(texts, rows, strict=True):
            ids = np.asarray(row if row[: len(prefix)] == prefix else [*prefix, *row], dtype=np.int32)
            if len(ids) and int(ids.max()) >= self.vocab_size:
                raise DataError(
                    f"the tokenizer in {self.source} gives id {int(ids.max())} for {text[:60]!r}, but the model's "
                    f"vocab_size is {self.vocab_size}: tokenizer and model do not belong together"
                )
            encoded.append(ids)
        return encoded

    def control_token_in(self, text: str) -> str | None:
        """Returns the first special token that stands in `text` and that `encode` turns into a control token."""
        found = None if self._control_tokens is None else self._control_tokens.search(text)
        return None if found is None else found[0]

    def without_bos(self, text: str) -> str:
        """Returns `text` without the BOS that it begins with."""
        bos = self._tokenizer.bos_token
        return text.removeprefix(bos) if isinstance(bos, str) else text

    def decode(self, ids: NDArray[np.int32]) -> str:
        """Returns the text of `ids`, int32 [tokens], as the engine decodes a response.

        It leaves out an end token at the end; other special tokens are text.
        """
        ended = len(ids) > 0 and int(ids[-1]) in self.stop_token_ids
        text: str = self._tokenizer.decode(ids[:-1].tolist() if ended else ids.tolist(), skip_special_tokens=False)
        return text

    def token_of(self, text: str) -> int | None:
        """Returns the id of the one token that `text` is; None for a text of several."""
        known: int | None = self._tokenizer.get_vocab().get(text)
        tokens = [known] if known is not None else self.encode([text], add_special_tokens=False)[0].tolist()
        return tokens[0] if len(tokens) == 1 and tokens[0] < self.vocab_size else None

    def _turn_end_id(self) -> int | None:
        """The special token that follows the assistant's answer in the chat template; else the end token."""
        end = self.template.turn_end().lstrip() if self.template else ""
        found = None if self._control_tokens is None else self._control_tokens.match(end)
        ids = {
            text: token_id for token_id, text in _special_tokens(self._tokenizer).items() if token_id < self.vocab_size
        }
        return self.eos_token_id if found is None else ids.get(found[0], self.eos_token_id)


def _special_tokens(tokenizer: Any) -> dict[int, str]:
    """Id → text of each token that is no text, but controls the model."""
    added = tokenizer.added_tokens_decoder.items()
    return {int(token_id): str(token.content) for token_id, token in added if token.special}


def _control_tokens(tokenizer: Any) -> re.Pattern[str] | None:
    """What matches any special token in a text; None where there are none."""
    longest_first = sorted(_special_tokens(tokenizer).values(), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _tokens_before_text(tokenizer: Any) -> list[int]:
    """Ids that the tokenizer puts before a text when it adds special tokens."""
    bare, whole = (tokenizer("a", add_special_tokens=added)["input_ids"] for added in (False, True))
    starts = (start for start in range(len(whole)) if whole[start : start + len(bare)] == bare)
    return list(whole[: next(starts, 0)])


def _as_ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else [int(v) for v in value]


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ModelError(f"model.path: {path} is not valid JSON ({error})") from error
