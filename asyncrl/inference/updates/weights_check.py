"""Runs the engines' weight checker on all of them at once; `compare` is done by checksums.

The engine's own comparison needs a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asyncrl.data.fleet import EngineState
from asyncrl.errors import EngineError
from asyncrl.inference.engines.engine import ManagedEngine, on_each
from asyncrl.inference.engines.lifecycle import LIVE
from asyncrl.inference.sglang.engine_api import CheckAction, Checksums
from asyncrl.inference.updates.participants import complaints
from asyncrl.inference.updates.verify import abbreviate, differing


class WeightsCheck:
    """The weight checker of a fleet; remembers the last snapshot."""

    def __init__(self) -> None:
        self._references: dict[str, Checksums] = {}

    async def run(
        self, engines: Sequence[ManagedEngine], action: CheckAction, skip_list: Sequence[str]
    ) -> Mapping[str, Checksums]:
        """Runs `action` on all live engines that have their weights in memory.

        Returns engine id → checksums for `checksum`, else nothing. Raises EngineError that names every engine which did
        not answer; for `compare` also one that names the tensors which differ.
        """
        results: dict[str, Checksums] = {}
        read: CheckAction = "checksum" if action in ("snapshot", "compare") else action

        async def one(engine: ManagedEngine) -> None:
            results[engine.engine_id] = await engine.client.check_weights(read, skip_list)

        able = LIVE - {EngineState.STARTING}
        asked = [engine for engine in engines if engine.state in able and "weights" not in engine.offloaded]
        failed = await on_each(asked, one)
        if failed:
            raise EngineError(f"weights were not checked ({action}): {complaints(failed)}")
        if action == "snapshot":
            self._references = results
        if action == "compare":
            self._compare(results)
        return results if action == "checksum" else {}

    def _compare(self, results: Mapping[str, Checksums]) -> None:
        different = {
            engine_id: differing(self._references[engine_id], sums)
            for engine_id, sums in results.items()
            if engine_id in self._references
        }
        told = "; ".join(f"{engine_id}: {abbreviate(names)}" for engine_id, names in different.items() if names)
        if not different:
            raise EngineError("no snapshot to compare with; await check_weights('snapshot') first")
        if told:
            raise EngineError(f"weights differ from the snapshot in {told}")
