"""ChatTemplate: renders conversations with the chat template of a Hugging Face tokenizer.

Invariant: whatever the template does, one DataError says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from inspect import signature
from typing import Any

from asyncrl.config.nearest import did_you_mean, nearest
from asyncrl.data.rendering.messages import Messages
from asyncrl.errors import ConfigError, DataError

Arguments = Mapping[str, Any]
"""Further variables of the template, by name: {"enable_thinking": False}."""

_NO_ARGUMENTS: Arguments = {}
_MARK = "asyncrl0mark"  # a word that no template holds
_OPENED = re.compile(r"<[^<>]+>\s*$")
_USUAL_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


class ChatTemplate:
    """The chat template of one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is a Hugging Face tokenizer, with a template or without."""
        self._tokenizer = tokenizer

    def __bool__(self) -> bool:
        """Whether the tokenizer has a template."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    def render(self, messages: Messages, arguments: Arguments = _NO_ARGUMENTS) -> str:
        """Renders a conversation as text that a response continues.

        It ends with the header of the assistant's turn, or, where the last message is the assistant's, with the text of
        that message. A tag that both the header and the message open (`<think>`) stands there once. Raises DataError
        where the template refuses the conversation.
        """
        *before, last = messages
        if last["role"] != "assistant":
            return self._apply(messages, arguments, add_generation_prompt=True)
        header, beginning = self._apply(before, arguments, add_generation_prompt=True), str(last["content"])
        opened = _OPENED.search(header)
        if opened is not None and beginning.lstrip().startswith(opened[0].strip()):
            header = header[: opened.start()]
        return header + beginning

    def turn_end(self) -> str:
        """What the template writes after the assistant's answer (`<|im_end|>`); empty where that cannot be told."""
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        try:
            rendered = self._apply(messages, _NO_ARGUMENTS, add_generation_prompt=False)
        except DataError:
            return ""
        _, found, tail = rendered.rpartition(_MARK)
        return tail if found else ""

    def check_arguments(self, arguments: Arguments, setting: str) -> None:
        """Raises ConfigError for an argument that the template does not read. `setting` holds the arguments."""
        taken = {*signature(self._tokenizer.apply_chat_template).parameters, "messages"} - {"tools", "documents"}
        for name in arguments:
            if name in taken:
                raise ConfigError(f"{setting}.{name} is no argument of a chat template; take it out")
            if name not in self._words:
                hint = did_you_mean(nearest(name, self._words))
                raise ConfigError(f"{setting}.{name} has no effect: the chat template does not read it{hint}")

    def names(self, role: str) -> bool:
        """Whether the role is one of the usual ones, or the template names it."""
        return role in _USUAL_ROLES or role in self._words

    def reads(self, messages: Messages, index: int, arguments: Arguments = _NO_ARGUMENTS) -> bool:
        """Whether the template renders the content of this one of the messages, which it does not refuse."""
        other = [*messages]
        other[index] = other[index] | {"content": f"{other[index]['content']} {_MARK}"}
        try:
            return _MARK in self.render(other, arguments)
        except DataError:  # of the changed content
            return True

    def refused_at(self, messages: Messages, arguments: Arguments = _NO_ARGUMENTS) -> int:
        """Number of the first message, from 1, with which the template refuses messages that it refuses."""
        for count in range(len(messages) - 1, 0, -1):
            try:
                self._apply(messages[:count], arguments, add_generation_prompt=True)
            except DataError:
                continue
            return count + 1
        return 1

    @cached_property
    def _words(self) -> frozenset[str]:
        """All identifiers in the template's text: its variables, and roles that it names."""
        template = self._tokenizer.chat_template
        texts = template.values() if isinstance(template, Mapping) else (template,)
        return frozenset(word for text in texts for word in re.findall(r"[^\W\d]\w*", text))

    def _apply(self, messages: Messages, arguments: Arguments, *, add_generation_prompt: bool) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **arguments
            )
        except Exception as error:  # a template may raise anything
            kind, message = type(error).__name__, str(error).strip().partition("\n")[0]
            raise DataError(f"the chat template refuses the messages ({kind}: {message})") from error
        return text
