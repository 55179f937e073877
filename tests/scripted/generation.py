"""Requests of a scripted engine: slots, pauses, versions, aborts, the prefix cache. Tokens and times are made up.

Invariants
- At temperature 0, a token depends on the weights' digest and the tokens before it alone. Log-probs always do.
- A pause with `retract` keeps a request's tokens and frees its slot. A pause `in_place` keeps both, and one token in
  flight, which gets its stamp when it arrives. A pause with `abort` ends the request.
- A request that arrives during a pause waits in front of the scheduler. An abort of its id has no effect there, and the
  engine accepts no second one: then nothing ends the request early, not even a client that leaves.
- An abort needs the whole id of a known request. It also ends all requests whose ids begin with that id.
- No token of an answer is an end token of its request; the last one may count as one.
- A token gets the version that was stamped when its segment began. A new stamp begins a new segment.
- KV that is older than the weights is visible: cached prefixes and requests paused in place give other log-probs.

A request costs one timer per segment, not one per token, so one process can play hundreds of engines.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import anyio

from asyncrl.tasks import Changes

PauseMode = Literal["abort", "retract", "in_place"]
"""What a pause does with running requests."""
_DISCONNECT_POLL_S = 1.0
_ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


class Rejected(Exception):
    """The request is invalid: the engine answers 400 with this message."""


class OutOfVocabulary(Exception):
    """An id is outside the vocabulary. On a CPU, the real scheduler dies of it."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Duration of generation; by default it takes no time."""

    prefill_s: float = 0.0
    """Time for a prompt."""
    token_s: float = 0.0
    """Median time for a token."""
    spread: float = 0.0
    """Sigma of the log-normal factor (median 1) that each request draws for its time per token."""
    mean_tokens: float | None = None
    """Mean length of answers with a long-tailed distribution; None: each answer is as long as its request allows."""


@dataclass(slots=True, eq=False)
class _Request:
    rid: str
    prompt: tuple[int, ...]
    limit: int
    """Tokens after which it ends."""
    stops: bool
    """True if it ends with the stop token and not because of max_new_tokens."""
    temperature: float
    token_s: float
    """Time for each of its tokens."""
    ends: frozenset[int]
    """Tokens that would end it; it gets none of them."""
    extra_key: str
    """Part of the key of its prefix in the cache."""
    with_prompt: bool
    """True if the request asks for log-probs of the prompt, which the prefix cache does not have."""
    debt_s: float
    """Time that must pass before the next token."""
    chain: int
    """Hash of all its tokens so far."""
    kv: int | None = None
    """Digest of the weights that made its KV; None before the prefill."""
    cached: int = 0
    """Prompt tokens that came from the prefix cache."""
    retractions: int = 0
    """Number of times that it lost its slot."""
    aborted: bool = False
    """True once an abort has taken effect."""
    abort_sent: bool = False
    """True once an abort named its id, with or without effect."""
    running: bool = False
    """True while it has a slot."""
    since: float = 0.0
    """Start of its current segment, by the clock of the event loop."""
    in_flight: tuple[str, int] | None = None
    """Version and digest of the weights of a token in flight during a pause in place."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[str, int]] = field(default_factory=list)
    """(version, end) of each span of tokens."""
    makers: list[str] = field(default_factory=list)
    """Version of the weights that really made each token; its stamp may be another."""
    wake: Changes = field(default_factory=Changes)

    @property
    def done(self) -> bool:
        """True if it gets no more tokens."""
        return self.aborted or len(self.tokens) >= self.limit


class Generation:
    """The requests of one life of an engine."""

    def __init__(
        self, digest: Callable[[], int], *, latency: Latency, slots: int, vocab_size: int, context: int, seed: int
    ) -> None:
        self.version = "default"
        """Stamp for tokens."""
        self.paused: PauseMode | None = None
        """Mode of the current pause; None while it generates."""
        self._digest = digest
        self._latency = latency
        self._slots = slots
        self._vocab_size = vocab_size
        self._context = context
        self._random = random.Random(seed)
        self._live: dict[str, _Request] = {}
        """Requests that the scheduler knows, oldest first."""
        self._known: dict[str, _Request] = {}
        """Requests that the scheduler knows, and requests that wait in front of it."""
        self.makers: dict[str, list[str]] = {}
        """By id of a request that has ended, the version of the weights that really made each token."""
        self._brake: int | None = None
        self._changes = Changes()
        self.cache: dict[tuple[str, tuple[int, ...]], int] = {}
        """By extra key and prompt, the digest of the weights that made the cached KV."""

    @property
    def running(self) -> int:
        """Number of requests that have a slot."""
        return sum(request.running for request in self._live.values())

    @property
    def waiting(self) -> int:
        """Number of requests without a slot."""
        return len(self._known) - self.running

    @property
    def half_done(self) -> int:
        """Number of running requests that have at least one token by now and need at least one more."""
        now, found = anyio.current_time(), 0
        for request in self._live.values():
            if request.running and request.kv is not None and request.token_s:
                made = len(request.tokens) + int((now - request.since - request.debt_s) / request.token_s)
                found += 0 < made < request.limit - 1
        return found

    @property
    def braked(self) -> int:
        """Number of running requests that have tokens and get no more because of the brake."""
        return sum(
            bool(request.running and request.tokens and self._left(request) == 0) for request in self._live.values()
        )

    def brake(self, tokens: int | None) -> None:
        """From now on a request stands still in its slot, with so many tokens or those that it has. None: all go on."""
        self._brake = tokens
        self._wake()

    def stamp(self, version: str) -> None:
        """Stamps later tokens with `version`."""
        self.version = version
        self._wake()

    async def pause(self, mode: PauseMode) -> None:
        """Pauses generation; with `abort`, returns once no request is left."""
        self.paused = mode
        if mode == "retract":
            for request in self._live.values():
                if request.running:
                    request.running = False
                    request.retractions += 1
        if mode == "in_place":
            for request in self._live.values():
                if request.running and request.kv is not None:
                    request.in_flight = (self.version, self._digest())
        if mode == "abort":
            self.abort("", everything=True)
        self._wake()
        while mode == "abort" and self._live:
            await self._changes.wait()

    def go_on(self) -> None:
        """Ends the pause."""
        self.paused = None
        self._wake()

    def abort(self, rid: str, *, everything: bool = False) -> None:
        """Ends all requests whose ids begin with `rid`, if a request `rid` is known; or ends `everything`.

        A request that the scheduler knows ends during a pause, too.
        """
        if not everything:
            known = self._known.get(rid)
            if known is None or known.abort_sent:
                return
            known.abort_sent = True
        for request in self._live.values():
            if everything or request.rid.startswith(rid):
                request.aborted = True
        self._wake()

    def finish(self) -> None:
        """Ends every request that the scheduler knows, as if its limit were the tokens it has now (at least one)."""
        for request in self._live.values():
            request.limit = max(1, len(request.tokens))
        self._wake()

    def flush(self) -> bool:
        """Empties the prefix cache; returns False, with no effect, if a request runs or (when not paused) waits."""
        if self.running or (self.paused is None and self._live):
            return False
        self.cache.clear()
        return True

    async def wait_idle(self) -> None:
        """Returns once the scheduler knows no request."""
        while self._live:
            await self._changes.wait()

    async def generate(self, body: dict[str, Any], gone: Callable[[], bool]) -> dict[str, Any]:
        """Returns the answer to a /generate request; `gone` tells whether the client has left.

        Raises Rejected for an invalid request, and OutOfVocabulary for an id outside the vocabulary.
        """
        request = self._new(body)
        self._known[request.rid] = request
        try:
            while self.paused is not None:
                await self._changes.wait()
            self._live[request.rid] = request
            self._admit()
            while not request.done and (request.abort_sent or not gone()):
                await self._segment(request)
            if request.kv is not None and not request.with_prompt:
                self.cache[request.extra_key, request.prompt] = request.kv
            return self._payload(request)
        finally:
            del self._known[request.rid]
            self.makers[request.rid] = request.makers
            self._live.pop(request.rid, None)
            self._admit()
            self._changes.notify()

    def _new(self, body: dict[str, Any]) -> _Request:
        prompt, params = tuple(body["input_ids"]), body.get("sampling_params", {})
        limit = params.get("max_new_tokens", 128)
        rid = body.get("rid") or f"{self._random.getrandbits(128):032x}"
        temperature = params.get("temperature", 1.0)
        if not prompt:
            raise Rejected("input_ids should not be empty.")
        if len(prompt) + limit > self._context:
            raise Rejected(f"Requested token count exceeds the model's maximum context length of {self._context}.")
        if temperature < 0:
            raise Rejected(f"temperature must be non-negative, got {temperature}.")
        if rid in self._known:
            raise Rejected(f"Duplicate request ID detected: {rid}")
        if not 0 <= min(prompt) <= max(prompt) < self._vocab_size:
            raise OutOfVocabulary
        stops, mean = False, self._latency.mean_tokens
        if mean is not None and not params.get("ignore_eos", False):
            length = max(1, round(self._random.lognormvariate(math.log(mean) - 0.5, 1.0)))
            stops, limit = length <= limit, min(limit, length)
        spread = self._latency.spread
        return _Request(
            rid=rid,
            prompt=prompt,
            limit=limit,
            stops=stops,
            temperature=temperature,
            token_s=self._latency.token_s * (self._random.lognormvariate(0.0, spread) if spread else 1.0),
            ends=frozenset(params.get("stop_token_ids", ())),
            extra_key=body.get("extra_key") or "",
            with_prompt=body.get("logprob_start_len") is not None,
            debt_s=self._latency.prefill_s,
            chain=zlib.crc32(repr(prompt).encode()),
        )

    async def _segment(self, request: _Request) -> None:
        """Generates until something changes or the request is done."""
        if not request.running or self.paused is not None:
            with anyio.move_on_after(_DISCONNECT_POLL_S):
                await request.wake.wait()
            return
        if request.kv is None:
            self._prefill(request)
        if request.in_flight is not None:
            (maker, digest), request.in_flight = request.in_flight, None
            self._emit(request, min(1, request.limit - len(request.tokens)), self.version, digest, maker)
        version, digest, request.since = self.version, self._digest(), anyio.current_time()
        left = self._left(request)
        if left == 0 and not request.done:
            with anyio.move_on_after(_DISCONNECT_POLL_S):
                await request.wake.wait()
            return
        due_s = request.debt_s + left * request.token_s
        with anyio.move_on_after(min(due_s, _DISCONNECT_POLL_S)):
            await request.wake.wait()
        elapsed = anyio.current_time() - request.since
        if elapsed >= due_s:
            count = left
        else:
            count = max(0, int((elapsed - request.debt_s) / request.token_s)) if request.token_s else 0
            request.debt_s -= elapsed - count * request.token_s
        self._emit(request, count, version, digest)
        if request.retractions and not request.running:
            request.kv, request.debt_s = None, self._latency.prefill_s

    def _left(self, request: _Request) -> int:
        """Tokens that the request gets before anything changes."""
        made = len(request.tokens)
        return request.limit - made if self._brake is None else max(0, min(request.limit, self._brake) - made)

    def _prefill(self, request: _Request) -> None:
        kv = None if request.with_prompt else self.cache.get((request.extra_key, request.prompt))
        request.cached = 0 if kv is None else len(request.prompt) - 1
        request.kv = self._digest() if kv is None else kv

    def _emit(self, request: _Request, count: int, version: str, digest: int, maker: str | None = None) -> None:
        request.makers += [(maker or version).partition("@")[0]] * count
        if request.kv is not None and request.kv != digest:
            digest = zlib.crc32(request.kv.to_bytes(4, "big"), digest)
        salt = digest.to_bytes(4, "big")
        for _ in range(count):
            state = zlib.crc32(salt, request.chain)
            choice = state ^ self._random.getrandbits(32) if request.temperature else state
            token = choice % self._vocab_size
            while token in request.ends:
                token = (token + 1) % self._vocab_size
            request.tokens.append(token)
            request.logprobs.append(-(zlib.crc32(token.to_bytes(4, "big"), state) % 4096 + 1) / 1024)
            request.chain = zlib.crc32(token.to_bytes(4, "big"), request.chain)
        if count:
            if request.spans and request.spans[-1][0] == version:
                request.spans.pop()
            request.spans.append((version, len(request.tokens)))

    def _admit(self) -> None:
        free = self._slots - self.running if self.paused is None else 0
        for request in self._live.values():
            if free <= 0:
                return
            if not request.running:
                request.running = True
                request.wake.notify()
                free -= 1

    def _wake(self) -> None:
        self._admit()
        for request in self._live.values():
            request.wake.notify()
        self._changes.notify()

    def _payload(self, request: _Request) -> dict[str, Any]:
        finish: dict[str, Any] = {"type": "length", "length": len(request.tokens)}
        if request.stops:
            finish = {"type": "stop", "matched": request.tokens[-1]}
        if request.aborted or len(request.tokens) < request.limit:
            finish = _ABORTED
        starts = [0, *(end for _, end in request.spans)]
        spans = [
            {"version": version, "start": start, "end": end}
            for start, (version, end) in zip(starts, request.spans, strict=False)
        ]
        return {
            "text": " ".join(map(str, request.tokens)),
            "output_ids": request.tokens,
            "meta_info": {
                "id": request.rid,
                "finish_reason": finish,
                "prompt_tokens": len(request.prompt),
                "completion_tokens": len(request.tokens),
                "cached_tokens": request.cached,
                "weight_version": request.spans[-1][0] if request.spans else self.version,
                "weight_versions": spans,
                "num_retractions": request.retractions,
                "input_token_logprobs": self._prompt_logprobs(request) if request.with_prompt else [],
                "output_token_logprobs": [
                    [logprob, token, None] for logprob, token in zip(request.logprobs, request.tokens, strict=True)
                ],
                "output_token_logprobs_length": len(request.tokens),
                "dp_rank": None,
                "e2e_latency": 0.0,
            },
        }

    def _prompt_logprobs(self, request: _Request) -> list[list[Any]]:
        state, logprobs = self._digest(), [[None, request.prompt[0], None]]
        for token in request.prompt[1:]:
            state = zlib.crc32(token.to_bytes(4, "big"), state)
            logprobs.append([-(state % 4096 + 1) / 1024, token, None])
        return logprobs
