"""From a record to the text of its prompt: through the chat template, or unchanged.

Invariant: what cannot be rendered as its author meant it is refused with file and line; what can, but looks like a
mistake, is counted and told.
"""

from __future__ import annotations

import re
from typing import Any

from asyncrl.config.sections.data import DataConfig
from asyncrl.data.fields import Record, required_field
from asyncrl.data.rendering.findings import Findings
from asyncrl.data.rendering.messages import Messages, text_messages, tool_names
from asyncrl.data.tokenizer import PolicyTokenizer
from asyncrl.errors import ConfigError, DataError

_MEDIA_FIELDS = ("image", "images", "video", "videos", "audio", "audios")
_PLACEHOLDER = re.compile(r"<(?:image|video|audio)>")
_LEFT_OUT = "the chat template leaves it out"
_JSON_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](?:role|content)["']\s*:""")


class PromptRenderer:
    """Renders the records of one source."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PolicyTokenizer,
        findings: Findings,
        where: str,
        settings: str | None = None,
    ) -> None:
        """`where` names the source in messages, and `settings` the section that says how to render it.

        Raises ConfigError for a chat setting that the tokenizer does not support.
        """
        self._key = config.prompt_key
        self._tokenizer = tokenizer
        self._findings = findings
        self.where = where
        """The setting that names the source."""
        self._settings = settings = settings or where
        self._arguments = config.chat_template_args
        self._control_tokens = config.control_tokens
        self._system: Messages = []
        self._roles: set[str] = set()
        """Roles that were met so far."""
        self.chat = tokenizer.uses_chat_template(config.chat_template)
        """Whether prompts go through the chat template."""
        given = {"system_prompt": config.system_prompt, "chat_template_args": config.chat_template_args}
        for name, value in given.items():
            if value and not self.chat:
                raise ConfigError(
                    f"{settings}.{name} is set, but prompts are rendered as plain text; set {settings}.chat_template "
                    "= true"
                )
        if self.chat:
            tokenizer.template.check_arguments(self._arguments, f"{settings}.chat_template_args")
        if config.system_prompt is not None:
            self._system = [{"role": "system", "content": config.system_prompt}]
            self._check_system_prompt()

    def __call__(self, record: Record) -> str:
        """Returns the prompt of `record` as text; raises DataError for a record that cannot be rendered."""
        value = required_field(record, self._key, self.where, f"{self._settings}.prompt_key")
        self._look_beside(record)
        if isinstance(value, str):
            return self._render_string(record, value)
        try:
            messages = text_messages(value)
        except DataError as error:
            hint = "" if isinstance(value, list | tuple) else f"; set {self._settings}.prompt_key"
            raise self._refused(record, f"must be a string or a list of chat messages, but {error}{hint}") from error
        if not self.chat:
            raise self._refused(
                record,
                "holds chat messages, but prompts are rendered as plain text: use a tokenizer with a chat template, or "
                "give the prompt as a string",
            )
        self._look_at_text(record, *(m["content"] for m in messages if m["role"] != "assistant"))
        return self._render_messages(record, self._system_before(record, messages), messages)

    def _render_string(self, record: Record, value: str) -> str:
        if _JSON_MESSAGES.match(value):
            raise self._refused(
                record,
                "is a string that holds chat messages as JSON, and would be one user's message; save the messages "
                "themselves, or decode them in a source of your own (package.module:function)",
            )
        self._look_at_text(record, value if self.chat else self._tokenizer.without_bos(value))
        if not self.chat:
            return value
        return self._render_messages(record, self._system, [{"role": "user", "content": value}])

    def _render_messages(self, record: Record, system: Messages, messages: Messages) -> str:
        template, whole = self._tokenizer.template, [*system, *messages]
        try:
            text = template.render(whole, self._arguments)
        except DataError as error:
            number = template.refused_at(whole, self._arguments) - len(system)
            raise self._refused(record, f"cannot be rendered: at message {max(1, number)}, {error}") from error
        for number, message in enumerate(messages, start=1):
            role = message["role"]
            unread = next((name for name in tool_names(number, message) if name not in text), None)
            if unread is not None:
                raise self._refused(record, f"calls the tool {unread!r} in message {number}: {_LEFT_OUT}")
            if not self._is_read(whole, len(system) + number - 1):
                raise self._refused(record, f'has message {number} with the role "{role}": {_LEFT_OUT}')
            if not template.names(role):
                self._findings.add(
                    "messages have a role that the chat template does not name; usual are system, user and assistant",
                    record.place,
                    role,
                )
        return text

    def _is_read(self, messages: Messages, index: int) -> bool:
        """Whether the template renders the role of a message; tried once for each role."""
        message = messages[index]
        role, is_begun_answer = message["role"], index == len(messages) - 1 and message["role"] == "assistant"
        # A template may leave out the text beside a tool call.
        if role in self._roles or message.get("tool_calls") or is_begun_answer:
            return True
        self._roles.add(role)
        return self._tokenizer.template.reads(messages, index, self._arguments)

    def _system_before(self, record: Record, messages: Messages) -> Messages:
        """The system prompt, unless the messages have one of their own."""
        if self._system and any(message["role"] == "system" for message in messages):
            what = f"prompts have a system message of their own; {self._settings}.system_prompt is not added to them"
            self._findings.add(what, record.place)
            return []
        return self._system

    def _check_system_prompt(self) -> None:
        messages, template = [*self._system, {"role": "user", "content": "?"}], self._tokenizer.template
        try:
            template.render(messages, self._arguments)
        except DataError as error:
            raise ConfigError(f"{self._settings}.system_prompt: {error}; write it into the prompts") from error
        if not template.reads(messages, 0, self._arguments):
            raise ConfigError(f"{self._settings}.system_prompt: {_LEFT_OUT}; write it into the prompts")

    def _look_at_text(self, record: Record, *texts: str) -> None:
        """Looks for placeholders and control tokens in what a user wrote."""
        placeholder = next((found[0] for text in texts if (found := _PLACEHOLDER.search(text))), None)
        if placeholder is not None:
            self._findings.add(
                "prompts hold a placeholder of a medium; only text is trained on", record.place, placeholder
            )
        if self._control_tokens == "allow":
            return
        token = next(filter(None, map(self._tokenizer.control_token_in, texts)), None)
        if token is None:
            return
        if self._control_tokens == "error":
            raise self._refused(
                record,
                f"holds {token!r}, which would become a control token; take it out of the text, or set "
                f'{self._settings}.control_tokens = "warn"',
            )
        what = (
            f'prompts hold text that becomes a control token; {self._settings}.control_tokens = "error" refuses them, '
            '"allow" keeps this quiet'
        )
        self._findings.add(what, record.place, token)

    def _look_beside(self, record: Record) -> None:
        field = next((name for name in _MEDIA_FIELDS if _holds_something(record.fields.get(name))), None)
        if field is not None:
            self._findings.add(
                "records have a field of a medium, which is not used; only text is trained on", record.place, field
            )
        if self.chat and "tools" not in self._arguments and _holds_something(record.fields.get("tools")):
            what = f"records have tools, which are not rendered; {self._settings}.chat_template_args.tools is for all"
            self._findings.add(what, record.place)

    def _refused(self, record: Record, why: str) -> DataError:
        return DataError(f'{self.where}: {record.place}: field "{self._key}" {why}')


def _holds_something(value: Any) -> bool:
    """Whether a field is neither null nor empty; an array has no truth of its own."""
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)
