"""GenerateClient: sends prompts to the router's /generate and brings the answers back, through every failure.

Invariants
- Each attempt has its own id: client nonce, sample id, turn, attempt number. So several clients may share a router. No
  id begins another one, because an engine aborts by prefix; none is used twice, because an engine refuses an id that it
  saw a moment ago.
- Each attempt has a deadline, and each failure goes through `retry.py`: nothing is retried for ever. The clock of the
  deadlines stands still while engines are paused (`engine_clock.py`).
- An attempt that ended without an answer is given up (`RequestObserver.given_up`): an engine may still work on it.
- What an aborted attempt had generated becomes part of the answer, where it is to be kept (`partial.py`).
- While the client is held it sends nothing, repeated attempts included.
- What cannot have been sampled is not believed (`answers.py`): it is a failure, counted by defect and engine, and the
  request is sent again. Once weights of a step were published, that holds for each token made by weights that this
  client was never told of, and by weights older than those of the token before it. An engine is stamped with new
  weights while it is paused, so an answer that comes with news in a pause is judged at the end of the pause.
- One HTTP session, whose pool is as large as the number of requests in flight: a smaller one would queue them unseen.
"""

from __future__ import annotations

import random
import secrets
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Literal, Protocol

import aiohttp
import anyio
import msgspec
import structlog
from msgspec.structs import replace

from asyncrl.data.fleet import ROUTING_KEY_HEADER, routing_key
from asyncrl.data.sample import FinishReason
from asyncrl.data.staleness import step_of
from asyncrl.rollout.group_events import RequestFailed
from asyncrl.rollout.requests.answers import Asked, AttemptFailed, Defect, decode_answer
from asyncrl.rollout.requests.engine_clock import EngineClock
from asyncrl.rollout.requests.partial import PartialRollout
from asyncrl.rollout.requests.retry import RequestFault, RetryHistory, RetryPolicy, parse_retry_after
from asyncrl.rollout.requests.stops import Detokenize, ended_at_stop
from asyncrl.rollout.requests.wire import Generation, SamplingParams, attribute_steps_in_flight, encode_request
from asyncrl.tasks import Changes

_log = structlog.get_logger(__name__)

_CONNECT_TIMEOUT_S = 10.0  # loopback or cluster network: a connection that takes longer will not come
_KEEPALIVE_S = (
    4.0  # below the 5 s after which uvicorn closes an idle connection, so that no request meets a closing one
)
_HEADERS = {"Content-Type": "application/json"}
_UNTRIED = RetryHistory()
_ROUTER_ERROR = "X-SMG-Error-Code"
_KNOWS_NO_ENGINE = "model_not_found"  # smg's word, with a 404, for what sglang-router answers 503


def request_id(nonce: str, sample_id: str, turn: int, attempt: int) -> str:
    """The id of one attempt.

    A dot follows the turn, so the id of turn 1 does not begin that of turn 10; attempt numbers have one width.
    """
    return f"{nonce}-{sample_id}{f't{turn}' if turn else ''}.{attempt:04d}"


class GenerationFailed(Exception):
    """The last attempt of a request failed; the message is the reason that is kept with the sample."""


class RequestObserver(Protocol):
    """Learns what happens to the attempts of a client. Its methods must return at once."""

    def believed(self, engine: str) -> None:
        """The engine of this id gave an answer that can have been sampled."""

    def failed(self, failure: RequestFailed) -> None:
        """An attempt failed."""

    def given_up(self, rid: str, reason: str) -> None:
        """The attempt of this id ended without an answer: an engine may still work on it."""


class Unobserved:
    """A RequestObserver that ignores everything: engines find out by themselves."""

    def believed(self, engine: str) -> None:
        """Ignores it."""

    def failed(self, failure: RequestFailed) -> None:
        """Ignores it."""

    def given_up(self, rid: str, reason: str) -> None:
        """Ignores it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """How a client sends requests and reads answers."""

    vocab_size: int
    """Token ids of an answer are below it."""
    timeout_s: float
    """Longest wait for one answer, by the clock of the engines."""
    retry: RetryPolicy
    sticky: Literal["off", "group", "sample"] = "off"
    """Which requests ask for the same engine."""
    keeps_kv: bool = False
    """Engines keep the KV of running requests, and their prefix caches, when weights change. A request then shares KV
    only with requests of this client that were sent under the same weights (`GenerateClient.published`): an engine that
    outlives its jobs has met other weights of the same version."""
    keeps_aborted: bool = False
    """What an aborted request had generated is kept, and the next attempt goes on from there, not anew."""
    owner: str | None = None
    """Name of the job, which engines that outlive it bear in their stamps."""
    detokenize: Detokenize | None = None
    """Needed where aborted requests are kept, and where responses have stop strings."""


@dataclass(frozen=True, slots=True)
class ClientStatistics:
    """A snapshot."""

    in_flight: int
    """Requests that are on the wire, or wait to be sent again."""
    completed: int
    failed: int
    """Requests given up."""
    failed_attempts: Mapping[RequestFault, int]
    malformed: Mapping[tuple[Defect, str], int]
    """Answers that cannot have been sampled, by defect and id of the engine (empty where it is not known)."""


class GenerateClient:
    """Construct it in the event loop; `aclose` it, or use it as an async context manager."""

    def __init__(
        self,
        router_url: str,
        options: RequestOptions,
        *,
        observer: RequestObserver | None = None,
        clock: EngineClock | None = None,
    ) -> None:
        """Sends nothing yet. `clock` is the one that stands still while the engines are paused."""
        self._url = router_url.rstrip("/") + "/generate"
        self._options = options
        self._observer: RequestObserver = observer or Unobserved()
        self._clock = clock or EngineClock()
        self._published: str | None = None
        self._by_step = False
        """Whether published versions name a step."""
        self._publications: dict[str, int] = {}
        """All versions that were published, with their places in that order."""
        self._on_the_wire: set[str] = set()
        self._answers = Changes()
        self._held = 0
        self._released = Changes()
        self._nonce = secrets.token_hex(4)
        self._random = random.Random()
        self._in_flight = 0
        self._completed = 0
        self._failed = 0
        self._failed_attempts: Counter[RequestFault] = Counter()
        self._malformed: Counter[tuple[Defect, str]] = Counter()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
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
        """Closes the connections; engines free what still runs for them. Idempotent."""
        await self._session.close()

    def statistics(self) -> ClientStatistics:
        """Counts since the client was made."""
        return ClientStatistics(
            self._in_flight, self._completed, self._failed, dict(self._failed_attempts), dict(self._malformed)
        )

    @property
    def on_the_wire(self) -> frozenset[str]:
        """Ids of the attempts that were sent and have no answer yet."""
        return frozenset(self._on_the_wire)

    async def answered(self, rids: Collection[str]) -> None:
        """Returns when none of these attempts is on the wire; each has its deadline."""
        while not self._on_the_wire.isdisjoint(rids):
            await self._answers.wait()

    def published(self, version: str) -> None:
        """Engines hold `version` now."""
        self._published = version
        self._publications.setdefault(version, len(self._publications))
        self._by_step = step_of(version) is not None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Sends nothing, while requests on the wire go on."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            self._released.notify()

    async def generate(
        self, sample_id: str, input_ids: msgspec.Raw, sampling: SamplingParams, *, turn: int = 0
    ) -> Generation:
        """The answer to one request: that of number `turn` of a sample. Raises GenerationFailed."""
        self._in_flight += 1
        try:
            generation = await self._until_answered(sample_id, turn, input_ids, sampling)
        except GenerationFailed:
            self._failed += 1
            raise
        finally:
            self._in_flight -= 1
        self._completed += 1
        return generation

    async def _until_answered(
        self, sample_id: str, turn: int, input_ids: msgspec.Raw, sampling: SamplingParams
    ) -> Generation:
        """Attempt after attempt. Raises GenerationFailed when the policy gives up."""
        history, attempt = _UNTRIED, 0
        partial: PartialRollout | None = None
        while True:
            try:
                generation = await self._attempt(
                    request_id(self._nonce, sample_id, turn, attempt),
                    input_ids if partial is None else partial.input_ids,
                    sampling if partial is None else partial.sampling,
                    self._headers(sample_id, history.failures),
                )
            except AttemptFailed as failure:
                if self._options.keeps_aborted and failure.partial is not None:
                    partial = partial or PartialRollout.begin(input_ids, sampling)
                    partial = partial.extended(failure.partial)
                    if (whole := self._whole(partial, partial.end, sampling)) is not None:
                        return whole
                history, delay_s = self._options.retry.after(
                    history, failure.kind, self._random.random(), failure.retry_after_s
                )
                self._report(sample_id, attempt, failure, retried=delay_s is not None)
                if delay_s is None:
                    raise GenerationFailed(f"{failure} (attempt {attempt + 1}, the last)") from failure
                # By the clock of the engines: while they are paused there is no use in sending again.
                await self._clock.sleep(delay_s, "next attempt", f"router, after {failure.kind} of {sample_id}")
                attempt += 1
            else:
                if generation.engine:
                    self._observer.believed(generation.engine)
                if partial is None and not sampling.stop:
                    return generation
                partial = (partial or PartialRollout.begin(input_ids, sampling)).extended(generation)
                whole = self._whole(partial, generation.finish_reason, sampling)
                assert whole is not None, "it has ended"
                return replace(whole, engine=generation.engine)

    def _whole(self, partial: PartialRollout, end: FinishReason | None, sampling: SamplingParams) -> Generation | None:
        """The response if it has ended, at a stop string or as `end` says; None if it goes on."""
        detokenize = self._options.detokenize
        assert detokenize is not None, "there are stop strings, or aborted requests are kept"
        whole = partial.whole(end or "length", detokenize)
        stopped = ended_at_stop(whole, sampling.stop, detokenize) if sampling.stop else None
        return stopped or (whole if end is not None else None)

    def _headers(self, sample_id: str, failures: int) -> Mapping[str, str]:
        """Headers of an attempt after `failures` failures of the engine: it asks for another engine than those."""
        key = routing_key(self._options.sticky, f"{self._nonce}-{sample_id}")  # others may send to the same router
        if key is None:
            return _HEADERS
        return {**_HEADERS, ROUTING_KEY_HEADER: f"{key}~{failures}" if failures else key}

    async def _attempt(
        self, rid: str, input_ids: msgspec.Raw, sampling: SamplingParams, headers: Mapping[str, str]
    ) -> Generation:
        while self._held:
            await self._released.wait()
        sent_under = self._published if self._options.keeps_kv else None
        extra_key = None if sent_under is None else f"{self._nonce}-{sent_under}"
        request = encode_request(rid, input_ids, sampling, extra_key)
        self._on_the_wire.add(rid)
        try:
            with self._clock.waiting("response", rid, self._options.timeout_s):
                async with self._session.post(self._url, data=request, headers=headers) as response:
                    body = await response.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise AttemptFailed(RequestFault.UNREACHABLE, str(error)) from error
        except TimeoutError as error:
            self._observer.given_up(rid, RequestFault.TIMED_OUT)
            raise AttemptFailed(RequestFault.TIMED_OUT, str(error)) from error
        except (aiohttp.ClientError, OSError) as error:
            self._observer.given_up(rid, RequestFault.DISCONNECTED)
            raise AttemptFailed(RequestFault.DISCONNECTED, f"{type(error).__name__}: {error}") from error
        except anyio.get_cancelled_exc_class():
            self._observer.given_up(rid, "cancelled")
            raise
        finally:
            self._on_the_wire.remove(rid)
            self._answers.notify()
        no_engine = response.status == 404 and response.headers.get(_ROUTER_ERROR) == _KNOWS_NO_ENGINE
        try:
            asked = Asked(rid, sampling, self._options.vocab_size, self._options.owner)
            generation = decode_answer(503 if no_engine else response.status, body, asked)
        except AttemptFailed as failure:
            failure.retry_after_s = parse_retry_after(response.headers.get("Retry-After"), datetime.now(UTC))
            if failure.partial is not None:
                failure.partial = await self._made_by(failure.partial, sent_under)
            raise
        return await self._made_by(generation, sent_under)

    async def _made_by(self, generation: Generation, sent_under: str | None) -> Generation:
        """With the weights that made each token; AttemptFailed for weights that cannot have made it."""
        if (wrong := self._unpublished(generation)) is not None and self._clock.paused:
            await self._clock.running()
            wrong = self._unpublished(generation)
        if wrong is not None:
            raise AttemptFailed(RequestFault.MALFORMED, wrong, Defect.UNPUBLISHED, generation.engine)
        if not self._options.keeps_kv:
            return generation
        return replace(generation, versions=attribute_steps_in_flight(generation.versions, sent_under))

    def _unpublished(self, generation: Generation) -> str | None:
        """Which tokens weights made that were not published, or not in this order; None where all is well."""
        if not self._by_step:
            return None
        newest = -1
        for span in generation.versions:
            number = self._publications.get(span.version, -1)
            if number < newest or number < 0:
                order = "" if number < 0 else f", after newer ones (published as number {newest})"
                return f"tokens {span.start}-{span.end} by weights {span.version!r}{order}"
            newest = number
        return None

    def _report(self, sample_id: str, attempt: int, failure: AttemptFailed, *, retried: bool) -> None:
        self._failed_attempts[failure.kind] += 1
        if failure.defect is not None:
            source = (failure.defect, failure.engine)
            self._malformed[source] += 1
            if self._malformed[source] == 1:  # each further one is an event
                _log.warning(
                    "an answer is not believed: it cannot be what was sampled",
                    engine=failure.engine or "unknown",
                    sample=sample_id,
                    reason=failure.detail,
                )
        self._observer.failed(
            RequestFailed(
                sample_id=sample_id,
                request_attempt=attempt,
                failure=failure.kind,
                detail=failure.detail,
                engine=failure.engine,
                retried=retried,
            )
        )
