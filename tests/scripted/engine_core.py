"""The scripted engine behind its HTTP endpoints: weights, generation, memory, and the locks that calls take.

Invariants, as measured on the real engine
- The scheduler does one thing at a time. A blocked receive blocks every call that needs the scheduler, and generation.
- A weight call on a paused engine holds the lock that pause and continue need, so a hung call blocks both. On an engine
  that is not paused, it first waits for every running request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

import anyio
from aiohttp import web
from torch import Tensor

from tests.scripted.faults import Fault
from tests.scripted.generation import Generation, Latency
from tests.scripted.scheduler import Scheduler
from tests.scripted.server import ScriptedServer, answer
from tests.scripted.weights import HeldWeights, Refused, default_tensors

SIGQUIT = -3
"""Exit code of the engine's processes when a scheduler of theirs has died."""


class EngineCore(ScriptedServer):
    """One engine. Each life begins with fresh memory (`fresh_memory`); the other attributes belong to the test."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        tensor_parallel: int = 1,
        latency: Latency = Latency(),  # noqa: B008 - frozen
        device: Literal["cpu", "cuda"] = "cpu",
        slots: int = 128,
        vocab_size: int = 1 << 20,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.base = dict(default_tensors() if tensors is None else tensors)
        """Tensors that it loads at its start. It knows no other names."""
        self.tensor_parallel = tensor_parallel
        self.data_parallel = 1
        """Only changes the answer to /server_info."""
        self.latency = latency
        self.device = device
        self.slots = slots
        self.vocab_size = vocab_size
        self.context_length = 1 << 20
        self.initial_model_path = "/models/base"
        self.architectures = ["Qwen3ForCausalLM"]
        self.package_version = "0.5.23"
        self.seed = seed
        self.health_generates = False
        """True: /health makes the engine generate. The job starts its engines without that."""
        self.fresh_memory()

    def fresh_memory(self) -> None:
        """Loads the base weights; forgets requests, versions, offloads and updates."""
        self.weights = HeldWeights(self.base, self.tensor_parallel)
        self.generation = Generation(
            lambda: self.weights.digest,
            latency=self.latency,
            slots=self.slots,
            vocab_size=self.vocab_size,
            context=self.context_length,
            seed=self.seed + self.lives,
        )
        self.model_path = self.initial_model_path
        self.sessions: set[str] = set()
        """Ids of the open sessions (those of requests, not of updates)."""
        self.offloaded: set[str] = set()
        self.memory_calls: list[tuple[str, tuple[str, ...]]] = []
        """("release" | "resume", tags) of each memory call, in order."""
        self.updates: list[dict[str, Any]] = []
        """Bodies of the weight transfers that succeeded, without tensors."""
        self._pause_lock = anyio.Lock()
        self._scheduler = Scheduler()

    def forget(self) -> None:
        """Drops the groups, which closes their connections."""
        self.weights.groups.clear()

    def script(self, *faults: Fault) -> None:
        """Sets faults, besides those that are set already."""
        self.faults.add(*faults)

    # its state

    @property
    def version(self) -> str:
        """Weight version in its stamp, without its id."""
        return self.generation.version.partition("@")[0]

    @property
    def paused(self) -> bool:
        """True while generation is paused."""
        return self.generation.paused is not None

    @property
    def session(self) -> bool:
        """True while a weight-update session is open."""
        return self.weights.session

    def freeze(self) -> None:
        """Stops the scheduler. The HTTP server still answers the calls that need no scheduler."""
        self._scheduler.freeze()

    def thaw(self) -> None:
        """Lets the scheduler go on."""
        self._scheduler.thaw()

    async def _weight_call(self, call: Callable[[], Awaitable[str]]) -> web.Response:
        try:
            if self.paused:
                async with self._pause_lock, self._scheduler.turn():
                    message = await call()
            else:
                await self.generation.wait_idle()
                async with self._scheduler.turn():
                    message = await call()
        except Refused as refusal:
            return answer(400, success=False, message=str(refusal))
        return answer(success=True, message=message)

    def _require_session(self, endpoint: str) -> None:
        if not self.weights.session:
            raise Refused(f"{endpoint} must run between begin_weight_update() and end_weight_update()")

    def _updated(self, body: Mapping[str, Any], message: str) -> str:
        self.updates.append({key: value for key, value in body.items() if key != "serialized_named_tensors"})
        if body.get("weight_version") is not None:
            self.generation.stamp(body["weight_version"])
        if body.get("flush_cache", True) and not self.generation.flush():
            raise Refused(
                "Weights were updated, but the cache was not flushed because requests are still running or queued. "
                "Retract or finish them, then call /flush_cache."
            )
        return message

    async def _crash(self) -> None:
        self.kill(SIGQUIT)
        await anyio.sleep_forever()
