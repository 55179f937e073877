"""The update session of a single engine: opened, closed, given up. No order between engines, no state of the fleet.

Invariants
- `open_session` = pause (running requests keep their tokens, unless told otherwise) → stamp `torn:<version>` → open.
- `close_session` leaves an engine that goes on: unpaused and without a session, whatever state it was in.
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.errors import EngineError
from asyncrl.inference.engines.engine import ManagedEngine
from asyncrl.inference.sglang.engine_api import EngineRequestError, PauseMode
from asyncrl.inference.updates.deadlines import Deadlines

PAUSE_MODES: Mapping[str, PauseMode] = {
    "retract": "retract",
    "in_place": "in_place",
    "wait": "retract",  # for requests that did not end in time
    "abort": "abort",
}
"""`weights.on_update` → how engines are paused."""


async def open_session(
    engine: ManagedEngine, version: str, *, verify: bool, deadlines: Deadlines, mode: PauseMode = "retract"
) -> None:
    """Makes `engine` ready to receive weights `version`; raises EngineError.

    `mode` says what becomes of running requests. With `verify`, an engine that never had weights of this run is given a
    baseline first: random numbers and their checksums.
    """
    client = engine.client
    if engine.endpoint.external and engine.version is not None:
        await _check_holds(engine, engine.version, deadlines)
    if not engine.offloaded:
        await client.pause(mode, deadlines.pause_s)
    await client.set_version(f"torn:{version}", deadlines.step_s)
    await client.begin_weight_update(deadlines.step_s)
    if engine.version is None and not engine.proved and verify:
        await client.check_weights("reset_tensors", timeout_s=deadlines.walk_s)
        engine.baseline = await client.check_weights("checksum", timeout_s=deadlines.walk_s)


async def stamp(engine: ManagedEngine, version: str, deadlines: Deadlines) -> None:
    """Stamps weights that arrived as `version`; raises EngineError where somebody else changed the engine meanwhile."""
    if engine.endpoint.external:
        await _check_holds(engine, f"torn:{version}", deadlines)
    await engine.client.set_version(version, deadlines.step_s)


async def _check_holds(engine: ManagedEngine, version: str, deadlines: Deadlines) -> None:
    held = (await engine.client.model_info(deadlines.step_s)).weight_version
    if held != version:
        raise EngineError(
            f"{engine.engine_id}: it holds weights {held!r} instead of {version!r}: somebody else uses it"
        )


async def close_session(engine: ManagedEngine, *, restored: str | None, deadlines: Deadlines) -> None:
    """Ends the session, which may not be open, and the pause; raises EngineError.

    The engine goes on with version `restored`; where that is None, its requests are aborted.
    """
    client = engine.client
    try:
        await client.end_weight_update(deadlines.walk_s)
    except EngineRequestError as error:
        if error.status != 400:  # 400: no session is open
            raise
    if restored is not None:
        await client.set_version(restored, deadlines.step_s)
    else:
        await client.abort_all(deadlines.step_s)
    await resume(engine, deadlines)
    if restored is None:
        # Requests that waited in the HTTP server while it was paused enter the scheduler only now.
        await client.abort_all(deadlines.step_s)


async def resume(engine: ManagedEngine, deadlines: Deadlines) -> None:
    """Ends the pause, unless memory of the engine is still away; raises EngineError."""
    if not engine.offloaded:
        await engine.client.resume(deadlines.step_s)
