"""Chat messages as data sets hold them → messages that a chat template can render. Pure.

Invariants
- Every `content` that leaves this module is text: parts of text are joined, null beside tool calls is empty.
- A field that is null is left out, since a template asks whether a field is there. Columnar files give every message
  the fields of all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.errors import DataError

Messages = list[dict[str, Any]]
"""A conversation: objects with `role` and `content`."""

_MEDIA = ("image", "video", "audio")


def text_messages(value: Any) -> Messages:
    """Returns the conversation `value` with text as the content of each message.

    Raises DataError, which begins with the number of the message, for anything else than a list of chat messages.
    """
    if not isinstance(value, list | tuple):
        raise DataError(f"it is {type(value).__name__}")
    if not value:
        raise DataError("it is an empty list")
    messages = [_text_message(number, message) for number, message in enumerate(value, start=1)]
    last = messages[-1]
    if last["role"] == "assistant":
        _check_continuable(len(messages), last)
    return messages


def _text_message(number: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise DataError(f"message {number} is {type(message).__name__}, not an object with `role` and `content`")
    fields: dict[str, Any] = {str(name): value for name, value in message.items() if value is not None}
    for name in ("role", "content"):
        if name not in message and not (name == "content" and fields.get("tool_calls")):
            raise DataError(f"message {number} has no `{name}` (found: {', '.join(map(str, message)) or 'nothing'})")
    role = message["role"]
    if not isinstance(role, str):
        raise DataError(f"the `role` of message {number} is {_kind(role)}, not a string")
    content, calls = fields.get("content"), tool_names(number, fields)
    return fields | {"content": "" if content is None and calls else _text(number, content)}


def _text(number: int, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise DataError(f"the `content` of message {number} is {_kind(content)}, not text or a list of text parts")
    return "".join(_part(number, part) for part in content)


def _part(number: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise DataError(f"message {number} has a part that is {_kind(part)}, not text")
    kind = str(part.get("type", "text"))
    media = next((medium for medium in _MEDIA if medium in kind), None)
    if media is not None:
        raise DataError(f"message {number} holds {media}s, and only text can be trained on")
    if kind != "text" or not isinstance(part.get("text"), str):
        found = ", ".join(map(str, part)) or "nothing"
        raise DataError(f"message {number} has a part of type {kind!r} that is no text (found: {found})")
    text: str = part["text"]
    return text


def _check_continuable(number: int, last: Mapping[str, Any]) -> None:
    """The assistant's last message is the beginning of the response, so it can hold nothing but text."""
    others = sorted(last.keys() - {"role", "content", "name"})
    if others:
        raise DataError(
            f"message {number} is the assistant's and the last one, so the response continues it; it may hold "
            f"`content` only (found: {', '.join(others)})"
        )
    if number == 1:
        raise DataError("its only message is the assistant's; the response needs a message to answer")


def tool_names(number: int, message: Mapping[str, Any]) -> list[str]:
    """Names of the functions that message `number` calls; raises DataError for calls that name none."""
    calls, names = message.get("tool_calls", ()), []
    for call in calls if isinstance(calls, list | tuple) else (calls,):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str):
            raise DataError(f"message {number} has a tool call without the name of a function")
        names.append(name)
    return names


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
