"""Requests of a scripted engine: slots, pauses, versions, aborts, the prefix cache. Tokens are made up, times chosen.

Invariants
- What is generated at temperature 0 is a function of the weights' digest and the tokens before; log-probs always are.
- A pause with `retract` keeps a request's tokens and gives its slot away; `in_place` keeps both, and one token on its
  way, which is stamped when it is there; `abort` ends it.
- A request that arrives during a pause waits in front of the scheduler. An abort of its id has no effect there, and is
  used up: nothing else ends it before its time, that its client left included.
- Who is to be aborted must be known by its whole id; all whose ids begin with it go with it.
- A token belongs to the version that was stamped when its segment began; a change of the stamp begins a new one.
- KV that is older than the weights shows: cached prefixes and requests paused in place give other log-probs.

A request costs one timer for each segment, not one for each token, so a process can play hundreds of engines.
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
_DISCONNECT_POLL_S = 1.0
_ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


class Rejected(Exception):
    """The engine answers 400 with this message."""


class OutOfVocabulary(Exception):
    """On CPU the scheduler dies of it."""


@dataclass(frozen=True, slots=True)
class Latency:
    """How long generation takes; zero is at once."""

    prefill_s: float = 0.0
    token_s: float = 0.0
    spread: float = 0.0
    """Sigma of the log-normal factor (median 1) that each request draws for its time per token."""
    mean_tokens: float | None = None
    """Mean length of an answer that may stop (long-tailed); None: every answer is as long as allowed."""


@dataclass(slots=True, eq=False)
class _Request:
    rid: str
    prompt: tuple[int, ...]
    limit: int
    stops: bool
    """Ends with the stop token rather than at the limit."""
    temperature: float
    token_s: float
    extra_key: str
    with_prompt: bool
    """Log-probs of the prompt were asked for, which the prefix cache does not serve."""
    debt_s: float
    """Time to be spent before the next token."""
    chain: int
    kv: int | None = None
    """Digest of the weights that made its KV; None: none yet."""
    cached: int = 0
    retractions: int = 0
    aborted: bool = False
    abort_sent: bool = False
    running: bool = False
    since: float = 0.0
    """Start of the segment that it generates now, by the clock of the event loop."""
    on_its_way: tuple[str, int] | None = None
    """Version and digest of the weights of a token that is on its way."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[str, int]] = field(default_factory=list)
    """(version, end)."""
    makers: list[str] = field(default_factory=list)
    """Version of the weights that really made each token."""
    wake: Changes = field(default_factory=Changes)

    @property
    def done(self) -> bool:
        return self.aborted or len(self.tokens) >= self.limit


class Generation:
    """The requests of one life of an engine."""

    def __init__(
        self, digest: Callable[[], int], *, latency: Latency, slots: int, vocab_size: int, context: int, seed: int
    ) -> None:
        self.version = "default"
        self.paused: PauseMode | None = None
        self._digest = digest
        self._latency = latency
        self._slots = slots
        self._vocab_size = vocab_size
        self._context = context
        self._random = random.Random(seed)
        self._live: dict[str, _Request] = {}
        """Requests that the scheduler knows, oldest first."""
        self._known: dict[str, _Request] = {}
        """Those, and those that wait in front of it."""
        self.makers: dict[str, list[str]] = {}
        """By id, of requests that ended: the version of the weights that really made each token."""
        self._changes = Changes()
        self.cache: dict[tuple[str, tuple[int, ...]], int] = {}

    @property
    def running(self) -> int:
        return sum(request.running for request in self._live.values())

    @property
    def waiting(self) -> int:
        return len(self._known) - self.running

    @property
    def half_done(self) -> int:
        """Running requests that have a token by now, and lack one."""
        now, found = anyio.current_time(), 0
        for request in self._live.values():
            if request.running and request.kv is not None and request.token_s:
                made = len(request.tokens) + int((now - request.since - request.debt_s) / request.token_s)
                found += 0 < made < request.limit - 1
        return found

    def stamp(self, version: str) -> None:
        self.version = version
        self._wake()

    async def pause(self, mode: PauseMode) -> None:
        self.paused = mode
        if mode == "retract":
            for request in self._live.values():
                if request.running:
                    request.running = False
                    request.retractions += 1
        if mode == "in_place":
            for request in self._live.values():
                if request.running and request.kv is not None:
                    request.on_its_way = (self.version, self._digest())
        if mode == "abort":
            self.abort("", everything=True)
        self._wake()
        while mode == "abort" and self._live:
            await self._changes.wait()

    def go_on(self) -> None:
        self.paused = None
        self._wake()

    def abort(self, rid: str, *, everything: bool = False) -> None:
        """Ends the request `rid`, and all whose ids begin with it; a queued one needs no continue for it."""
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
        """Every request that the scheduler knows ends now, as if what it has (at least a token) was all it may have."""
        for request in self._live.values():
            request.limit = max(1, len(request.tokens))
        self._wake()

    def flush(self) -> bool:
        """Empties the prefix cache unless something runs (or, when not paused, waits)."""
        if self.running or (self.paused is None and self._live):
            return False
        self.cache.clear()
        return True

    async def wait_idle(self) -> None:
        while self._live:
            await self._changes.wait()

    async def generate(self, body: dict[str, Any], gone: Callable[[], bool]) -> dict[str, Any]:
        """One answer of /generate. Raises Rejected, OutOfVocabulary; `gone` tells that the client has left."""
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
            extra_key=body.get("extra_key") or "",
            with_prompt=body.get("logprob_start_len") is not None,
            debt_s=self._latency.prefill_s,
            chain=zlib.crc32(repr(prompt).encode()),
        )

    async def _segment(self, request: _Request) -> None:
        """Tokens until something changes, or until the last."""
        if not request.running or self.paused is not None:
            with anyio.move_on_after(_DISCONNECT_POLL_S):
                await request.wake.wait()
            return
        if request.kv is None:
            self._prefill(request)
        if request.on_its_way is not None:
            (maker, digest), request.on_its_way = request.on_its_way, None
            self._emit(request, min(1, request.limit - len(request.tokens)), self.version, digest, maker)
        version, digest, request.since = self.version, self._digest(), anyio.current_time()
        left = request.limit - len(request.tokens)
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

    def _prefill(self, request: _Request) -> None:
        kv = None if request.with_prompt else self.cache.get((request.extra_key, request.prompt))
        request.cached = 0 if kv is None else len(request.prompt) - 1
        request.kv = self._digest() if kv is None else kv

    def _emit(self, request: _Request, count: int, version: str, digest: int, maker: str | None = None) -> None:
        request.makers += [maker or version] * count
        if request.kv is not None and request.kv != digest:
            digest = zlib.crc32(request.kv.to_bytes(4, "big"), digest)
        salt = digest.to_bytes(4, "big")
        for _ in range(count):
            state = zlib.crc32(salt, request.chain)
            choice = state ^ self._random.getrandbits(32) if request.temperature else state
            token = choice % self._vocab_size
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
