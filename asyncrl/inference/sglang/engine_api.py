"""The control endpoints of one SGLang engine as typed calls.

Invariants
- Every call has a deadline and is a registered wait, so a hung engine is named.
- Every failure (a refusal, no answer, a broken connection, a body that does not decode) is an `EngineRequestError` that
  carries the engine's id, the endpoint and an excerpt of the body.
- The client decides nothing: no retry, no state.

The client talks to the engine itself, never through the router, which does not proxy these endpoints.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar

import aiohttp
import msgspec
from msgspec.structs import force_setattr

from asyncrl.data.fleet import owner_in, read_stamp, stamp_of
from asyncrl.errors import EngineError
from asyncrl.observability.waits import waiting
from asyncrl.run_directory.engine_key import key_headers
from asyncrl.weights.buckets import TensorSpec

CONTROL_TIMEOUT_S = 30.0
"""For calls that touch no weights; measured 4 to 30 ms."""
WEIGHTS_TIMEOUT_S = 300.0
"""For calls that walk all weights (checksum, reset, load from disk); about 1 s per GB on one core."""
_EXCERPT_CHARACTERS = 600

PauseMode = Literal["retract", "in_place", "abort"]
CheckAction = Literal["snapshot", "reset_tensors", "compare", "checksum"]
T = TypeVar("T")


class EngineRequestError(EngineError):
    """A control request that was refused (`status` is set) or got no answer (`status` is None)."""

    def __init__(self, engine_id: str, endpoint: str, reason: str, status: int | None = None) -> None:
        self.engine_id = engine_id
        self.endpoint = endpoint
        self.status = status
        self.reason = reason
        answer = "no answer" if status is None else f"HTTP {status}"
        super().__init__(f"{engine_id}: {endpoint}: {answer}: {reason}")


class ModelInfo(msgspec.Struct, frozen=True):
    """The part of GET /model_info that the job reads."""

    model_path: str
    weight_version: str
    """Without the engine's id, which follows it in the engine's stamp. The whole stamp where it bears a job's name."""
    architectures: list[str] | None = None
    model_type: str | None = None

    def __post_init__(self) -> None:
        force_setattr(self, "weight_version", read_stamp(self.weight_version)[0])


class ServerInfo(msgspec.Struct, frozen=True):
    """The part of GET /server_info that the job reads."""

    tp_size: int
    dp_size: int = 1
    pp_size: int = 1
    model_path: str | None = None
    """With which it was started."""
    version: str | None = None
    """Of SGLang."""


class VersionRun(msgspec.Struct, frozen=True):
    """Tokens [start, end) of an answer were made under weights `version`."""

    version: str
    start: int
    end: int

    def __post_init__(self) -> None:
        force_setattr(self, "version", read_stamp(self.version)[0])


class GenerationMeta(msgspec.Struct, frozen=True):
    """How an answer of /generate was made."""

    weight_version: str
    completion_tokens: int
    finish_reason: dict[str, Any] | None = None
    weight_versions: tuple[VersionRun, ...] = ()

    def __post_init__(self) -> None:
        force_setattr(self, "weight_version", read_stamp(self.weight_version)[0])


class ProbeAnswer(msgspec.Struct, frozen=True):
    """One answer of /generate."""

    output_ids: tuple[int, ...]
    meta_info: GenerationMeta


class RankChecksums(msgspec.Struct, frozen=True):
    """Checksums of the tensors that one rank of an engine holds, by the engine's own (fused) names."""

    checksums: dict[str, str]
    per_gpu_checksum: str


Checksums = Sequence[RankChecksums]
"""One entry per rank of an engine, in rank order."""


class _CheckReply(msgspec.Struct, frozen=True):
    success: bool
    message: str = ""
    ranks: tuple[RankChecksums, ...] = ()


class _Reply(msgspec.Struct, frozen=True):
    success: bool = True
    message: str = ""


class EngineApi:
    """Control calls to the engine `engine_id` at `url`."""

    def __init__(
        self,
        engine_id: str,
        url: str,
        session: aiohttp.ClientSession,
        *,
        owner: str | None = None,
        key: str | None = None,
    ) -> None:
        """`owner`: name of the job, for the stamps of an engine that outlives it. `key`: for an engine of the job."""
        self.engine_id = engine_id
        self.url = url
        self._owner = owner
        self._headers = key_headers(key)
        self._session = session

    @classmethod
    @asynccontextmanager
    async def open(cls, engine_id: str, url: str, key: str | None = None) -> AsyncIterator[EngineApi]:
        """A client with a session of its own."""
        async with new_session() as session:
            yield cls(engine_id, url, session, key=key)

    # generation

    async def ping(self, timeout_s: float = 5.0) -> None:
        """Is answered while the HTTP server lives, paused or not; says nothing about the scheduler."""
        await self._call("GET", "/ping", None, timeout_s)

    async def health_generate(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Is answered once the scheduler made any token; an idle one makes a token for it. Never while paused.

        It takes at least a second (the server looks once per second), and the server itself gives up after 20 s.
        """
        await self._call("GET", "/health_generate", None, timeout_s)

    async def generate(
        self,
        input_ids: Sequence[int],
        *,
        max_new_tokens: int = 1,
        temperature: float = 0.0,
        timeout_s: float = CONTROL_TIMEOUT_S,
        **fields: Any,
    ) -> ProbeAnswer:
        """A real generation on this engine; `fields` are further top-level fields of /generate."""
        body = {
            "input_ids": list(input_ids),
            "sampling_params": {"max_new_tokens": max_new_tokens, "temperature": temperature, "ignore_eos": True},
            **fields,
        }
        return self._decode("/generate", await self._call("POST", "/generate", body, timeout_s), ProbeAnswer)

    async def pause(self, mode: PauseMode = "retract", timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """retract: running requests keep their tokens and have their KV recomputed after `resume`."""
        await self._call("POST", "/pause_generation", {"mode": mode}, timeout_s)

    async def resume(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Ends a pause; harmless when there is none."""
        await self._call("POST", "/continue_generation", {}, timeout_s)

    async def abort_all(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Ends every running and queued request with finish reason `abort`."""
        await self._call("POST", "/abort_request", {"abort_all": True}, timeout_s)

    async def flush_cache(self, idle_timeout_s: float = 0.0, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Empties the prefix cache; waits up to `idle_timeout_s` for running requests, then it is refused (400)."""
        await self._call("POST", f"/flush_cache?timeout={idle_timeout_s:g}", None, timeout_s + idle_timeout_s)

    # version and identity

    async def model_info(self, timeout_s: float = CONTROL_TIMEOUT_S) -> ModelInfo:
        """The version and the directory of the weights that the engine holds."""
        info = self._decode("/model_info", await self._call("GET", "/model_info", None, timeout_s), ModelInfo)
        return msgspec.structs.replace(info, weight_version=read_stamp(info.weight_version, self._owner)[0])

    async def owner(self, timeout_s: float = CONTROL_TIMEOUT_S) -> str | None:
        """The name of the job in the engine's stamp; None where it bears none."""
        raw = await self._call("GET", "/model_info", None, timeout_s)
        return owner_in(self._decode("/model_info", raw, ModelInfo).weight_version)

    async def server_info(self, timeout_s: float = CONTROL_TIMEOUT_S) -> ServerInfo:
        """The parallel sizes with which the engine was started; its scheduler answers."""
        return self._decode("/server_info", await self._call("GET", "/server_info", None, timeout_s), ServerInfo)

    async def set_version(self, version: str, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Stamps every token generated from now on with `version` and this engine's id; running requests go on."""
        await self._set_stamp(stamp_of(version, self.engine_id, self._owner), timeout_s)

    async def disown(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Takes the name of the job off the engine's stamp."""
        await self._set_stamp("free", timeout_s)

    async def _set_stamp(self, stamp: str, timeout_s: float) -> None:
        body = {"new_version": stamp, "abort_all_requests": False}
        await self._command("/update_weight_version", body, timeout_s)

    async def open_session(self, name: str, timeout_s: float = CONTROL_TIMEOUT_S) -> bool:
        """Opens the session `name`; False where it is open. It holds no memory before a request uses it."""
        try:
            await self._call("POST", "/open_session", {"session_id": name, "capacity_of_str_len": 1}, timeout_s)
        except EngineRequestError as error:
            if error.status != 400:
                raise
            return False
        return True

    async def close_session(self, name: str, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Closes the session `name`; does nothing where it is not open."""
        await self._call("POST", "/close_session", {"session_id": name}, timeout_s)

    # weights

    async def begin_weight_update(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Opens the update session. Pause first: unpaused it waits for every running request to finish."""
        await self._command("/begin_weight_update", {}, timeout_s)

    async def end_weight_update(self, timeout_s: float = WEIGHTS_TIMEOUT_S) -> None:
        """Closes the update session; refused with 400 when none is open."""
        await self._command("/end_weight_update", {}, timeout_s)

    async def init_weights_group(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        timeout_s: float,
    ) -> None:
        """Joins the broadcast group as ranks `rank_offset + tp_rank`; the scheduler blocks until rank 0 joins too."""
        body = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        await self._command("/init_weights_update_group", body, timeout_s)

    async def destroy_weights_group(self, group_name: str, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Leaves the broadcast group."""
        await self._command("/destroy_weights_update_group", {"group_name": group_name}, timeout_s)

    async def update_from_distributed(
        self,
        tensors: Sequence[TensorSpec],
        *,
        group_name: str,
        flattened: bool,
        flush_cache: bool,
        timeout_s: float,
    ) -> None:
        """Receives one bucket that rank 0 broadcasts: tensor by tensor in this order, or all as one uint8 tensor."""
        body = {
            "names": [t.name for t in tensors],
            "dtypes": [t.dtype for t in tensors],
            "shapes": [list(t.shape) for t in tensors],
            "group_name": group_name,
            "load_format": "flattened_bucket" if flattened else None,
            "flush_cache": flush_cache,
        }
        await self._command("/update_weights_from_distributed", body, timeout_s)

    async def update_from_tensor(
        self,
        serialized_named_tensors: Sequence[str],
        *,
        flattened: bool,
        flush_cache: bool,
        timeout_s: float = WEIGHTS_TIMEOUT_S,
    ) -> None:
        """Takes a same-host process's tensors: one base64 string per TP rank (SGLang's MultiprocessingSerializer)."""
        body = {
            "serialized_named_tensors": list(serialized_named_tensors),
            "load_format": "flattened_bucket" if flattened else None,
            "flush_cache": flush_cache,
        }
        await self._command("/update_weights_from_tensor", body, timeout_s)

    async def update_from_disk(
        self, model_path: str, *, flush_cache: bool = True, timeout_s: float = WEIGHTS_TIMEOUT_S
    ) -> None:
        """Loads the weights of a Hugging Face directory."""
        body = {"model_path": model_path, "flush_cache": flush_cache}
        await self._command("/update_weights_from_disk", body, timeout_s)

    async def check_weights(
        self, action: CheckAction, skip_list: Sequence[str] = (), timeout_s: float = WEIGHTS_TIMEOUT_S
    ) -> tuple[RankChecksums, ...]:
        """Runs the engine's weight checker; returns each rank's checksums for `checksum`, else nothing.

        `skip_list` holds parts of tensor names.
        """
        body = {"action": action, "skip_tensor_list": list(skip_list)}
        raw = await self._call("POST", "/weights_checker", body, timeout_s)
        return self._decode("/weights_checker", raw, _CheckReply).ranks

    # memory (GPU only: on CPU these end the engine's process)

    async def release_memory(self, tags: Sequence[str] | None, timeout_s: float = WEIGHTS_TIMEOUT_S) -> None:
        """Releases memory of `tags`; None releases all. Pause first."""
        await self._call("POST", "/release_memory_occupation", _tags(tags), timeout_s)

    async def resume_memory(self, tags: Sequence[str] | None, timeout_s: float = WEIGHTS_TIMEOUT_S) -> None:
        """Takes memory of `tags` back; None takes all."""
        await self._call("POST", "/resume_memory_occupation", _tags(tags), timeout_s)

    async def _command(self, endpoint: str, body: Mapping[str, Any], timeout_s: float) -> None:
        raw = await self._call("POST", endpoint, body, timeout_s)
        reply = self._decode(endpoint, raw, _Reply)
        if not reply.success:
            raise EngineRequestError(self.engine_id, endpoint, reply.message, 200)

    async def _call(self, method: str, endpoint: str, body: Mapping[str, Any] | None, timeout_s: float) -> bytes:
        if self._session.closed:
            raise EngineRequestError(self.engine_id, endpoint, "the fleet has been disposed of")
        data = None if body is None else msgspec.json.encode(body)
        headers = {**self._headers, **({} if body is None else {"Content-Type": "application/json"})}
        try:
            with waiting(endpoint.lstrip("/"), self.engine_id, timeout_s):
                async with self._session.request(method, self.url + endpoint, data=data, headers=headers) as response:
                    raw = await response.read()
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            raise EngineRequestError(self.engine_id, endpoint, str(error) or type(error).__name__) from error
        if response.status != 200:
            raise EngineRequestError(self.engine_id, endpoint, _excerpt(raw), response.status)
        return raw

    def _decode(self, endpoint: str, raw: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(raw, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise EngineRequestError(self.engine_id, endpoint, f"{error}: {_excerpt(raw)}", 200) from error


def new_session() -> aiohttp.ClientSession:
    """A session for control calls: no proxies from the environment, deadlines set by each call.

    Every call opens a connection of its own: an engine closes idle ones after 5 s, and a POST must not meet that.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
    return aiohttp.ClientSession(
        timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True), trust_env=False
    )


def _tags(tags: Sequence[str] | None) -> dict[str, Any]:
    return {} if tags is None else {"tags": list(tags)}


def _excerpt(raw: bytes) -> str:
    text = raw.decode(errors="replace").strip()
    return text if len(text) <= _EXCERPT_CHARACTERS else text[:_EXCERPT_CHARACTERS] + " ..."
