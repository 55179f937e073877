"""EngineClient: sends prompts to the router's /generate and brings back what was sampled, whatever happens on the way.

Invariants
- Each attempt has its own id: client nonce, sample id, attempt number. All are of one width, because the engine aborts
  by prefix, and none is used twice, because it refuses an id it has seen a moment ago.
- Each attempt has a deadline, and each failure goes through `retry.py`: nothing is retried for ever.
- One session, whose pool is as large as the number of requests in flight: a smaller one would queue them unseen.
"""

from __future__ import annotations

import random
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

import aiohttp
import anyio
import msgspec

from asyncrl.data.fleet import ROUTING_KEY_HEADER, routing_key
from asyncrl.observability.waits import WAITS, waiting
from asyncrl.rollout.events import RequestFailed
from asyncrl.rollout.retry import FailureKind, RetryHistory, RetryPolicy
from asyncrl.rollout.wire import AttemptFailed, Generation, decode_answer, encode_request

_CONNECT_TIMEOUT_S = 10.0  # loopback or cluster network: a connection that takes longer will not come
_KEEPALIVE_S = (
    4.0  # below the 5 s after which uvicorn closes an idle connection, so that no request meets a closing one
)
_HEADERS = {"Content-Type": "application/json"}
_ROUTER_ERROR = "X-SMG-Error-Code"
_KNOWS_NO_ENGINE = "model_not_found"  # smg's word, with a 404, for what sglang-router answers 503


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
    failed_attempts: Mapping[FailureKind, int]


class EngineClient:
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
    ) -> None:
        """`sticky` says which requests ask for the same engine; `on_failure` hears of every failed attempt."""
        self._url = router_url.rstrip("/") + "/generate"
        self._vocab_size = vocab_size
        self._timeout_s = timeout_s
        self._policy = policy
        self._sticky = sticky
        self._on_failure = on_failure
        self._nonce = secrets.token_hex(4)
        self._random = random.Random()
        self._in_flight = 0
        self._completed = 0
        self._failed = 0
        self._failed_attempts: Counter[FailureKind] = Counter()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=concurrency, keepalive_timeout=_KEEPALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
        )

    async def __aenter__(self) -> EngineClient:
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

    async def generate(self, sample_id: str, input_ids: msgspec.Raw, sampling_params: msgspec.Raw) -> Generation:
        """One response to one prompt. Raises GenerationFailed when the policy gives up."""
        history = RetryHistory()
        key = routing_key(self._sticky, sample_id)
        headers = _HEADERS if key is None else {**_HEADERS, ROUTING_KEY_HEADER: key}
        attempt = 0
        self._in_flight += 1
        try:
            while True:
                try:
                    generation = await self._attempt(
                        f"{self._nonce}-{sample_id}.{attempt:04d}", input_ids, sampling_params, headers
                    )
                except AttemptFailed as failure:
                    history, delay_s = self._policy.after(history, failure.kind, self._random.random())
                    self._report(sample_id, attempt, failure, retried=delay_s is not None)
                    if delay_s is None:
                        self._failed += 1
                        raise GenerationFailed(f"{failure} (attempt {attempt + 1}, the last)") from failure
                    with WAITS.register("next attempt", f"router, after {failure.kind} of {sample_id}", delay_s):
                        await anyio.sleep(delay_s)
                    attempt += 1
                else:
                    self._completed += 1
                    return generation
        finally:
            self._in_flight -= 1

    async def _attempt(
        self, rid: str, input_ids: msgspec.Raw, sampling_params: msgspec.Raw, headers: Mapping[str, str]
    ) -> Generation:
        request = encode_request(rid, input_ids, sampling_params)
        try:
            with waiting("response", rid, self._timeout_s):
                async with self._session.post(self._url, data=request, headers=headers) as response:
                    body = await response.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise AttemptFailed(FailureKind.UNREACHABLE, str(error)) from error
        except TimeoutError as error:
            raise AttemptFailed(FailureKind.TIMED_OUT, str(error)) from error
        except (aiohttp.ClientError, OSError) as error:
            raise AttemptFailed(FailureKind.DISCONNECTED, f"{type(error).__name__}: {error}") from error
        no_engine = response.headers.get(_ROUTER_ERROR) == _KNOWS_NO_ENGINE
        return decode_answer(503 if no_engine else response.status, body, self._vocab_size)

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
