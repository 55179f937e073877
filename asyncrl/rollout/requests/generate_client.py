"""GenerateClient: sends prompts to the router's /generate and brings back what was sampled, come what may.

Invariants
- Each attempt has its own id: client nonce, sample id, attempt number; so several clients may share a router. None
  begins another, because the engine aborts by prefix, and none is used twice, because it refuses an id it has seen a
  moment ago.
- Each attempt has a deadline, and each failure goes through `retry.py`: nothing is retried for ever. Their clock stands
  still while engines are paused (`engine_clock.py`).
- An attempt that ended without an answer is given up (`on_given_up`): an engine may still be at work on it.
- What an aborted attempt had generated is part of the answer, where it is to be kept (`partial.py`).
- While it is held nothing is sent, what is sent again included.
- Once weights of a step were published, an answer made by others of which no step is known is none: an engine that was
  just started again must not be asked before it holds what was published, and if it is all the same, it is a failure.
- One session, whose pool is as large as the number of requests in flight: a smaller one would queue them unseen.
"""

from __future__ import annotations

import random
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Literal

import aiohttp
import anyio
import anyio.lowlevel
import msgspec
from msgspec.structs import replace

from asyncrl.data.fleet import ROUTING_KEY_HEADER, routing_key
from asyncrl.data.staleness import step_of
from asyncrl.rollout.group_events import RequestFailed
from asyncrl.rollout.requests.engine_clock import EngineClock
from asyncrl.rollout.requests.partial import Detokenize, PartialRollout
from asyncrl.rollout.requests.retry import RequestFault, RetryHistory, RetryPolicy, parse_retry_after
from asyncrl.rollout.requests.wire import (
    AttemptFailed,
    Generation,
    attribute_steps_in_flight,
    decode_answer,
    encode_request,
)

_CONNECT_TIMEOUT_S = 10.0  # loopback or cluster network: a connection that takes longer will not come
_KEEPALIVE_S = (
    4.0  # below the 5 s after which uvicorn closes an idle connection, so that no request meets a closing one
)
_HEADERS = {"Content-Type": "application/json"}
_UNTRIED = RetryHistory()
_ROUTER_ERROR = "X-SMG-Error-Code"
_KNOWS_NO_ENGINE = "model_not_found"  # smg's word, with a 404, for what sglang-router answers 503


def _ignore(rid: str, reason: str) -> None:
    """Engines find out by themselves."""


def request_id(nonce: str, sample_id: str, attempt: int) -> str:
    """Of one attempt. No such id begins another one: an engine that is to abort one aborts all that begin like it."""
    return f"{nonce}-{sample_id}.{attempt:04d}"


class GenerationFailed(Exception):
    """A sample's last attempt failed; the message is the reason that is kept with the sample."""


@dataclass(frozen=True, slots=True)
class ClientStatistics:
    """A snapshot."""

    in_flight: int
    """Samples being generated: on the wire, or waiting to be sent again."""
    completed: int
    failed: int
    """Samples given up."""
    failed_attempts: Mapping[RequestFault, int]


class GenerateClient:
    """Construct it in the event loop; `aclose` it, or use it as an async context manager."""

    def __init__(
        self,
        router_url: str,
        *,
        vocab_size: int,
        concurrency: int,
        timeout_s: float,
        policy: RetryPolicy,
        sticky: Literal["off", "group", "sample"] = "off",
        on_failure: Callable[[RequestFailed], None] | None = None,
        clock: EngineClock | None = None,
        on_given_up: Callable[[str, str], None] = _ignore,
        keeps_kv: bool = False,
        detokenize: Detokenize | None = None,
    ) -> None:
        """Sends nothing yet.

        Args:
            timeout_s: longest wait for one answer, by the clock of `clock`.
            sticky: which requests ask for the same engine.
            on_failure: hears of every failed attempt.
            on_given_up: hears the id of every attempt that ended without an answer, and why.
            keeps_kv: engines keep the KV of running requests, and their prefix caches, when weights change. Requests
                then share KV with those of this client only that were sent under the same weights (`published`): an
                engine that outlives its jobs has met other weights of the same version.
            detokenize: what an aborted request had generated is kept, and the next attempt goes on from there; None:
                it begins anew.
        """
        self._url = router_url.rstrip("/") + "/generate"
        self._vocab_size = vocab_size
        self._timeout_s = timeout_s
        self._policy = policy
        self._sticky: Literal["off", "group", "sample"] = sticky
        self._on_failure = on_failure
        self._clock = clock or EngineClock()
        self._on_given_up = on_given_up
        self._keeps_kv = keeps_kv
        self._detokenize = detokenize
        self._published: str | None = None
        self._by_step = False
        """Whether published versions name a step."""
        self._on_the_wire: set[str] = set()
        self._answered: anyio.Event | None = None
        """Somebody waits for answers; set with the next one."""
        self._held = 0
        self._released = anyio.Event()
        self._nonce = secrets.token_hex(4)
        self._random = random.Random()
        self._in_flight = 0
        self._completed = 0
        self._failed = 0
        self._failed_attempts: Counter[RequestFault] = Counter()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=concurrency, keepalive_timeout=_KEEPALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
        )

    async def __aenter__(self) -> GenerateClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes the connections; engines free what was still running for them. Idempotent."""
        await self._session.close()

    def statistics(self) -> ClientStatistics:
        return ClientStatistics(self._in_flight, self._completed, self._failed, dict(self._failed_attempts))

    @property
    def on_the_wire(self) -> frozenset[str]:
        """Ids of the attempts that were sent and have no answer yet."""
        return frozenset(self._on_the_wire)

    async def answered(self, rids: Collection[str]) -> None:
        """Returns when none of these attempts is on the wire; each has its deadline."""
        while not self._on_the_wire.isdisjoint(rids):
            await anyio.lowlevel.checkpoint_if_cancelled()  # others may be answered in every turn of the loop
            self._answered = self._answered or anyio.Event()
            await self._answered.wait()

    def published(self, version: str) -> None:
        """Engines hold `version` now."""
        self._published = version
        self._by_step = step_of(version) is not None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Sends nothing, while what is on the wire goes on."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            if not self._held:
                self._released.set()
                self._released = anyio.Event()

    async def generate(self, sample_id: str, input_ids: msgspec.Raw, sampling_params: msgspec.Raw) -> Generation:
        """One response to one prompt. Raises GenerationFailed when the policy gives up."""
        history, attempt = _UNTRIED, 0
        partial: PartialRollout | None = None
        self._in_flight += 1
        try:
            while True:
                try:
                    generation = await self._attempt(
                        request_id(self._nonce, sample_id, attempt),
                        input_ids if partial is None else partial.input_ids,
                        sampling_params if partial is None else partial.sampling_params,
                        self._headers(sample_id, history.failures),
                    )
                except AttemptFailed as failure:
                    if self._detokenize is not None and failure.partial is not None:
                        partial = partial or PartialRollout.begin(input_ids, sampling_params)
                        partial = partial.extended(failure.partial)
                        if (end := partial.end) is not None:
                            self._completed += 1
                            return partial.whole(end, self._detokenize)
                    history, delay_s = self._policy.after(
                        history, failure.kind, self._random.random(), failure.retry_after_s
                    )
                    self._report(sample_id, attempt, failure, retried=delay_s is not None)
                    if delay_s is None:
                        self._failed += 1
                        raise GenerationFailed(f"{failure} (attempt {attempt + 1}, the last)") from failure
                    # by the engines' clock: paused ones have nothing to come back to
                    await self._clock.sleep(delay_s, "next attempt", f"router, after {failure.kind} of {sample_id}")
                    attempt += 1
                else:
                    self._completed += 1
                    if partial is None or self._detokenize is None:
                        return generation
                    return partial.extended(generation).whole(generation.finish_reason, self._detokenize)
        finally:
            self._in_flight -= 1

    def _headers(self, sample_id: str, failures: int) -> Mapping[str, str]:
        """Of an attempt after so many in which the engine failed: it asks for another engine than those before."""
        key = routing_key(self._sticky, f"{self._nonce}-{sample_id}")  # others may send to the same router
        if key is None:
            return _HEADERS
        return {**_HEADERS, ROUTING_KEY_HEADER: f"{key}~{failures}" if failures else key}

    async def _attempt(
        self, rid: str, input_ids: msgspec.Raw, sampling_params: msgspec.Raw, headers: Mapping[str, str]
    ) -> Generation:
        while self._held:
            await self._released.wait()
        sent_under = self._published if self._keeps_kv else None
        extra_key = None if sent_under is None else f"{self._nonce}-{sent_under}"
        request = encode_request(rid, input_ids, sampling_params, extra_key)
        self._on_the_wire.add(rid)
        try:
            with self._clock.waiting("response", rid, self._timeout_s):
                async with self._session.post(self._url, data=request, headers=headers) as response:
                    body = await response.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise AttemptFailed(RequestFault.UNREACHABLE, str(error)) from error
        except TimeoutError as error:
            self._on_given_up(rid, RequestFault.TIMED_OUT)
            raise AttemptFailed(RequestFault.TIMED_OUT, str(error)) from error
        except (aiohttp.ClientError, OSError) as error:
            self._on_given_up(rid, RequestFault.DISCONNECTED)
            raise AttemptFailed(RequestFault.DISCONNECTED, f"{type(error).__name__}: {error}") from error
        except anyio.get_cancelled_exc_class():
            self._on_given_up(rid, "cancelled")
            raise
        finally:
            self._on_the_wire.remove(rid)
            if self._answered is not None:
                self._answered.set()
                self._answered = None
        no_engine = response.status == 404 and response.headers.get(_ROUTER_ERROR) == _KNOWS_NO_ENGINE
        try:
            generation = decode_answer(503 if no_engine else response.status, body, self._vocab_size)
        except AttemptFailed as failure:
            failure.retry_after_s = parse_retry_after(response.headers.get("Retry-After"), datetime.now(UTC))
            if failure.partial is not None:
                failure.partial = self._made_by(failure.partial, sent_under)
            raise
        return self._made_by(generation, sent_under)

    def _made_by(self, generation: Generation, sent_under: str | None) -> Generation:
        """With the weights that made each token; AttemptFailed where nobody published them."""
        if self._by_step:
            for span in generation.versions:
                if step_of(span.version) is None:
                    made = f"tokens {span.start}-{span.end} were made by weights {span.version!r}"
                    raise AttemptFailed(RequestFault.MALFORMED, f"{made}, which nobody published")
        if not self._keeps_kv:
            return generation
        return replace(generation, versions=attribute_steps_in_flight(generation.versions, sent_under))

    def _report(self, sample_id: str, attempt: int, failure: AttemptFailed, *, retried: bool) -> None:
        self._failed_attempts[failure.kind] += 1
        if self._on_failure is not None:
            self._on_failure(
                RequestFailed(
                    sample_id=sample_id,
                    request_attempt=attempt,
                    failure=failure.kind,
                    detail=failure.detail,
                    retried=retried,
                )
            )
