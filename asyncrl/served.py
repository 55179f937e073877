"""A client for the models of `[models.NAME]`, by name: a judge that a reward asks, for example.

    from asyncrl.served import served_model

    async def score(sample, prompt) -> float:                                # async: all samples at once
        verdict = await served_model("judge").chat_async(f"Is this polite? Answer yes or no.\\n\\n{sample.text}")
        return float(verdict.strip().lower().startswith("yes"))

    def score(sample, prompt) -> float:                                      # sync: as many as reward.workers
        return float("yes" in served_model("judge").chat(f"Is this polite?\\n\\n{sample.text}", max_tokens=4))

A reward, `eval.function` and the loop may call it, in the driver and in a reward worker alike. The url is that of the
model's router, so that calls are spread over its engines. Any other client works too: `served_model("judge").url`.

Invariants
- A call ends within `timeout_s`. What passes by itself (a full queue, an engine that is started again) is tried again
  until then; what the engine refuses is an error at once.
- The job tells this module once, before any reward is imported, where the models are; workers are told when they start.
"""

from __future__ import annotations

import http.client
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from asyncrl.errors import ServedModelError

TIMEOUT_S = 60.0
_PAUSES_S = (0.1, 0.3, 1.0)
_BUSY = frozenset({408, 429, 500, 502, 503, 504})
_MAX_DETAIL = 300
_JSON = {"Content-Type": "application/json"}

Message = Mapping[str, str]
"""`{"role": "user", "content": "..."}`."""

_urls: dict[str, str] = {}


def declare_models(urls: Mapping[str, str]) -> None:
    """The models are served at these urls from now on, by name. The job calls it."""
    _urls.clear()
    _urls.update(urls)


def declared_models() -> dict[str, str]:
    """What was declared: for a process that the job starts."""
    return dict(_urls)


def served_model(name: str) -> ServedModel:
    """The client of the model of section [models.NAME]. Raises ServedModelError where none is served as `name`."""
    if name not in _urls:
        known = ", ".join(_urls) or "none"
        raise ServedModelError(
            f"no model is served as {name!r}; there are: {known} (each has a section [models.NAME] in the recipe)"
        )
    return ServedModel(name, _urls[name])


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Asks one model; every method raises ServedModelError."""

    name: str
    url: str
    """Of its router; `{url}/v1` is the base_url of an OpenAI client."""

    def chat(self, messages: str | Sequence[Message], *, timeout_s: float = TIMEOUT_S, **params: Any) -> str:
        """The model's answer to a chat (text: one message of the user), through its own chat template.

        Greedy unless `temperature` is given; `max_tokens` and whatever else the OpenAI route takes go in `params`.
        """
        return self._ask(_chat(self.name, messages, params), timeout_s)

    async def chat_async(
        self, messages: str | Sequence[Message], *, timeout_s: float = TIMEOUT_S, **params: Any
    ) -> str:
        """As `chat`; other tasks go on meanwhile."""
        return await self._ask_async(_chat(self.name, messages, params), timeout_s)

    def complete(self, prompt: str | Sequence[int], *, timeout_s: float = TIMEOUT_S, **params: Any) -> str:
        """How the model goes on after `prompt`: text, or token ids of its own tokenizer. No chat template is applied.

        Greedy unless `temperature` is given; `max_new_tokens` and other sampling parameters of SGLang go in `params`.
        """
        return self._ask(_completion(prompt, params), timeout_s)

    async def complete_async(self, prompt: str | Sequence[int], *, timeout_s: float = TIMEOUT_S, **params: Any) -> str:
        """As `complete`; other tasks go on meanwhile."""
        return await self._ask_async(_completion(prompt, params), timeout_s)

    def _ask(self, question: _Question, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        for pause_s in _pauses():
            try:
                status, answer = self._post(question, deadline - time.monotonic())
            except (OSError, http.client.HTTPException) as error:
                status, answer = None, f"{type(error).__name__}: {error}".encode()
            text = self._read(question, status, answer)
            if text is not None:
                return text
            if time.monotonic() + pause_s >= deadline:
                break
            time.sleep(pause_s)
        raise self._late(timeout_s, status, answer)

    async def _ask_async(self, question: _Question, timeout_s: float) -> str:
        import aiohttp
        import anyio

        status: int | None = None
        answer = b"no answer"
        with anyio.move_on_after(timeout_s):
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
                for pause_s in _pauses():
                    try:
                        async with session.post(
                            self.url + question.path, data=question.body, headers=_JSON
                        ) as response:
                            status, answer = response.status, await response.read()
                    except aiohttp.ClientError as error:
                        status, answer = None, f"{type(error).__name__}: {error}".encode()
                    text = self._read(question, status, answer)
                    if text is not None:
                        return text
                    await anyio.sleep(pause_s)
        raise self._late(timeout_s, status, answer)

    def _post(self, question: _Question, left_s: float) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=max(0.001, left_s))
        try:
            connection.request("POST", question.path, question.body, _JSON)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _read(self, question: _Question, status: int | None, answer: bytes) -> str | None:
        """The text of an answer; None where it is to be asked again."""
        if status is None or status in _BUSY:
            return None
        if status != 200:
            raise ServedModelError(f"the model {self.name!r} refuses: {_refusal(status, answer)}")
        try:
            return question.read(json.loads(answer))
        except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
            raise ServedModelError(f"the model {self.name!r} answers without a text: {_shown(answer)}") from error

    def _late(self, timeout_s: float, status: int | None, answer: bytes) -> ServedModelError:
        last = _shown(answer) if status is None else f"HTTP {status}: {_shown(answer)}"
        return ServedModelError(f"the model {self.name!r} did not answer within {timeout_s:g} s; last: {last}")


@dataclass(frozen=True, slots=True)
class _Question:
    path: str
    body: bytes
    read: Callable[[Any], str]
    """The text in an answer."""


def _chat(model: str, messages: str | Sequence[Message], params: Mapping[str, Any]) -> _Question:
    chat = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    body = {"model": model, "messages": chat, "temperature": 0.0} | dict(params)
    return _Question("/v1/chat/completions", _encoded(body), lambda a: str(a["choices"][0]["message"]["content"] or ""))


def _completion(prompt: str | Sequence[int], params: Mapping[str, Any]) -> _Question:
    key: dict[str, Any] = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(map(int, prompt))}
    body = key | {"sampling_params": {"max_new_tokens": 128, "temperature": 0.0} | dict(params)}
    return _Question("/generate", _encoded(body), lambda answer: str(answer["text"]))


def _encoded(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, default=str).encode(errors="replace")


def _pauses() -> Iterator[float]:
    return itertools.chain(_PAUSES_S, itertools.repeat(_PAUSES_S[-1]))


def _refusal(status: int, answer: bytes) -> str:
    """Why the model does not answer: the message of the error that it sends, or what came instead of one."""
    if b"tokenizer.chat_template is not set" in answer:
        return "its tokenizer has no chat template; ask it by complete or complete_async"
    try:
        message = json.loads(answer)["message"].encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        message = answer
    return f"HTTP {status}: {_shown(message)}"


def _shown(answer: bytes) -> str:
    return answer[:_MAX_DETAIL].decode(errors="replace")
