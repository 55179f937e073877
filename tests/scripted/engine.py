"""A scripted engine: the endpoints of the engine's API, over real tensors and made-up tokens.

Invariants, as measured on the real engine
- The HTTP server alone answers /ping and /model_info, whatever the scheduler does.
- The calls that kill the real engine kill this one: memory calls on a CPU or a busy engine, ids outside the vocabulary.
"""

from __future__ import annotations

from typing import Any, get_args

import anyio
import msgspec
from aiohttp import web

from tests.scripted.engine_core import EngineCore
from tests.scripted.faults import Fault
from tests.scripted.generation import OutOfVocabulary, PauseMode, Rejected
from tests.scripted.server import Handler, answer, error
from tests.scripted.weights import Refused

MEMORY_TAGS = ("kv_cache", "weights", "cuda_graph")
"""Kinds of memory that the engine releases and takes back."""
HEALTH_TIMEOUT_S = 20.0
"""Time after which /health_generate answers 503."""


class ScriptedEngine(EngineCore):
    """One engine with all of its endpoints."""

    def handlers(self) -> dict[str, Handler]:
        """All endpoints of the engine that the job uses, and two for scripts from another process."""
        return {
            "ping": self._ok,
            "ready": self._ready,
            "health": self._health_generate if self.health_generates else self._ok,
            "health_generate": self._health_generate,
            "model_info": self._model_info,
            "get_model_info": self._model_info,
            "server_info": self._server_info,
            "v1/loads": self._loads,
            "generate": self._generate,
            "pause_generation": self._pause,
            "continue_generation": self._continue,
            "abort_request": self._abort,
            "flush_cache": self._flush,
            "update_weight_version": self._stamp,
            "open_session": self._open_session,
            "close_session": self._close_session,
            "begin_weight_update": self._begin,
            "end_weight_update": self._end,
            "init_weights_update_group": self._join,
            "destroy_weights_update_group": self._leave,
            "update_weights_from_distributed": self._from_distributed,
            "update_weights_from_tensor": self._from_tensor,
            "update_weights_from_disk": self._from_disk,
            "weights_checker": self._check,
            "release_memory_occupation": self._release,
            "resume_memory_occupation": self._resume,
            "scripted/faults": self._set_faults,
            "scripted/state": self._tell_state,
        }

    async def _ok(self, body: dict[str, Any], http: web.Request) -> web.Response:
        return web.Response()

    async def _ready(self, body: dict[str, Any], http: web.Request) -> web.Response:
        return web.Response(status=503 if self.paused else 200)

    async def _health_generate(self, body: dict[str, Any], http: web.Request) -> web.Response:
        """Answers once the engine makes tokens: of a running request, or of a probe if none is running.

        While it is paused or stuck there is no answer, and then a 503. (The real engine looks once a second.)
        """
        with anyio.move_on_after(HEALTH_TIMEOUT_S):
            if self.paused or not self.generation.running:
                probe = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
                await self.generation.generate(probe, lambda: _gone(http))
            async with self._scheduler.turn():
                return web.Response()
        return web.Response(status=503)

    async def _model_info(self, body: dict[str, Any], http: web.Request) -> web.Response:
        return answer(
            model_path=self.model_path,
            is_generation=True,
            weight_version=self.generation.version,
            architectures=self.architectures,
        )

    async def _server_info(self, body: dict[str, Any], http: web.Request) -> web.Response:
        async with self._scheduler.turn():
            return answer(
                model_path=self.initial_model_path,
                tp_size=self.tensor_parallel,
                dp_size=self.data_parallel,
                pp_size=1,
                max_running_requests=self.slots,
                version=self.package_version,
                internal_states=[{}],
            )

    async def _loads(self, body: dict[str, Any], http: web.Request) -> web.Response:
        async with self._scheduler.turn():
            running, waiting = self.generation.running, self.generation.waiting
            load = {"dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": waiting, "token_usage": 0.0}
            return answer(version="0.5.23", loads=[load])

    async def _generate(self, body: dict[str, Any], http: web.Request) -> web.Response:
        try:
            payload = await self.generation.generate(body, lambda: _gone(http))
        except Rejected as rejection:
            return error(str(rejection))
        except OutOfVocabulary:
            await self._crash()
        async with self._scheduler.turn():
            await self.weights.settle()
            return answer(**payload)

    async def _pause(self, body: dict[str, Any], http: web.Request) -> web.Response:
        mode: PauseMode = body.get("mode", "abort")
        if mode not in get_args(PauseMode):
            return error(f"unknown pause mode {mode!r}")
        async with self._pause_lock, self._scheduler.turn():
            await self.generation.pause(mode)
        return answer(message="Generation paused successfully.", status="ok")

    async def _continue(self, body: dict[str, Any], http: web.Request) -> web.Response:
        async with self._pause_lock, self._scheduler.turn():
            self.generation.go_on()
        return answer(message="Generation continued successfully.", status="ok")

    async def _abort(self, body: dict[str, Any], http: web.Request) -> web.Response:
        self.generation.abort(body.get("rid", ""), everything=body.get("abort_all", False))
        return web.Response()

    async def _flush(self, body: dict[str, Any], http: web.Request) -> web.Response:
        async with self._scheduler.turn():
            if not self.generation.flush():
                with anyio.move_on_after(float(http.query.get("timeout", 0.0))):
                    await self.generation.wait_idle()
            flushed = self.generation.flush()
        return web.Response(
            text="Cache flushed.\n" if flushed else "Flush cache failed.\n", status=200 if flushed else 400
        )

    async def _stamp(self, body: dict[str, Any], http: web.Request) -> web.Response:
        if body.get("abort_all_requests", True):
            self.generation.abort("", everything=True)
        version = body["new_version"]
        async with self._scheduler.turn():
            self.generation.stamp(version)
        return answer(success=True, message=f"Weight version updated to {version}", new_version=version)

    async def _open_session(self, body: dict[str, Any], http: web.Request) -> web.Response:
        async with self._scheduler.turn():
            if body["session_id"] in self.sessions:
                return error("Failed to open the session. Check if a session with the same id is still open.")
            self.sessions.add(body["session_id"])
        return web.json_response(body["session_id"])

    async def _close_session(self, body: dict[str, Any], http: web.Request) -> web.Response:
        async with self._scheduler.turn():
            self.sessions.discard(body["session_id"])
        return web.Response()

    async def _begin(self, body: dict[str, Any], http: web.Request) -> web.Response:
        async def begin() -> str:
            if self.weights.session:
                raise Refused("a weight-update session is already open; call end_weight_update() first")
            self.weights.session = True
            return "Success"

        return await self._weight_call(begin)

    async def _end(self, body: dict[str, Any], http: web.Request) -> web.Response:
        async def end() -> str:
            if not self.weights.session:
                raise Refused("no weight-update session is open; call begin_weight_update() first")
            self.weights.session = False
            return "Success"

        return await self._weight_call(end)

    async def _join(self, body: dict[str, Any], http: web.Request) -> web.Response:
        try:
            async with self._scheduler.turn():
                await self.weights.join(body)
        except Refused as refusal:
            return answer(400, success=False, message=str(refusal))
        return answer(success=True, message="Succeeded to initialize custom process group.")

    async def _leave(self, body: dict[str, Any], http: web.Request) -> web.Response:
        try:
            async with self._scheduler.turn():
                await self.weights.settle()
                self.weights.leave(body["group_name"])
        except Refused as refusal:
            return answer(400, success=False, message=str(refusal))
        return answer(success=True, message="Succeeded to destroy custom process group.")

    async def _from_distributed(self, body: dict[str, Any], http: web.Request) -> web.Response:
        async def receive() -> str:
            self._require_session("update_weights_from_distributed")
            await self.weights.receive(body)
            return self._updated(body, "Succeeded to update parameter online.")

        return await self._weight_call(receive)

    async def _from_tensor(self, body: dict[str, Any], http: web.Request) -> web.Response:
        async def take() -> str:
            self._require_session("update_weights_from_tensor")
            try:
                flattened = body.get("load_format") == "flattened_bucket"
                self.weights.load_handles(body["serialized_named_tensors"], flattened)
            except Refused:
                await self._crash()  # the real engine does not catch this error
            return self._updated(body, "Success")

        return await self._weight_call(take)

    async def _from_disk(self, body: dict[str, Any], http: web.Request) -> web.Response:
        async def load() -> str:
            await self.weights.load_directory(body["model_path"])
            self.model_path = body["model_path"]
            return self._updated(body, "Succeeded to update model weights.")

        return await self._weight_call(load)

    async def _check(self, body: dict[str, Any], http: web.Request) -> web.Response:
        action = body.get("action", "checksum")
        async with self._scheduler.turn():
            await self.weights.settle()
            if action == "checksum":
                ranks = self.weights.rank_checksums(body.get("skip_tensor_list", ()))
                return answer(success=True, message="", ranks=ranks)
            if action == "reset_tensors":
                self.weights.reset()
        if action == "compare":
            return answer(400, success=False, message="Found no NVIDIA driver on your system.")
        known = action in ("snapshot", "reset_tensors")
        return answer(200 if known else 400, success=known, message=f"action {action!r}")

    async def _release(self, body: dict[str, Any], http: web.Request) -> web.Response:
        tags = tuple(body.get("tags") or MEMORY_TAGS)
        async with self._scheduler.turn():
            busy = self.generation.running or (not self.paused and self.generation.waiting)
            if self.device == "cpu" or busy:
                await self._crash()
            self.memory_calls.append(("release", tags))
            self.offloaded |= set(tags)
        return web.Response(text="null", content_type="application/json")

    async def _resume(self, body: dict[str, Any], http: web.Request) -> web.Response:
        tags = tuple(body.get("tags") or MEMORY_TAGS)
        async with self._scheduler.turn():
            if self.device == "cpu" or not self.offloaded.issuperset(tags):
                await self._crash()
            self.memory_calls.append(("resume", tags))
            self.offloaded -= set(tags)
            if "weights" in tags:
                self.weights.reset()  # the engine keeps no copy in host memory
        return web.Response(text="null", content_type="application/json")

    # endpoints of the script, for engines in another process

    async def _set_faults(self, body: dict[str, Any], http: web.Request) -> web.Response:
        self.faults.clear()
        self.faults.add(*(msgspec.convert(entry, Fault) for entry in body["faults"]))
        return answer(success=True)

    async def _tell_state(self, body: dict[str, Any], http: web.Request) -> web.Response:
        return answer(
            version=self.version,
            paused=self.paused,
            session=self.session,
            groups=list(self.weights.groups),
            digest=self.weights.digest,
            running=self.generation.running,
            waiting=self.generation.waiting,
            calls=self.calls,
        )


def _gone(http: web.Request) -> bool:
    return http.transport is None or http.transport.is_closing()
