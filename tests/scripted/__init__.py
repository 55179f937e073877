"""Scripted engines, a scripted router and a scripted host, for the fault tests and scale tests.

A scripted engine speaks the engine's HTTP API over real sockets, holds real tensors, joins real gloo groups, and takes
locks in the same order as the real engine. Only its tokens are made up. Faults are data (`Fault`), set for the nth call
of an endpoint.

- `faults`: what goes wrong at which call
- `server`: the life of a process on a port
- `generation`: requests, pauses, versions
- `weights`: tensors, groups
- `scheduler`: one call at a time
- `engine_core`: the engine behind its endpoints
- `engine`: the endpoints
- `router`, `host`: the other processes
- `answers`: a simpler engine, for tests that only need its answers to requests
- `python -m tests.scripted`: engines in a process of their own
"""

from __future__ import annotations

from tests.scripted.engine import ScriptedEngine
from tests.scripted.faults import Fault, die, drop, freeze, garbage, hang, instead, refuse, slow, truncate
from tests.scripted.generation import Latency
from tests.scripted.host import ScriptedHost
from tests.scripted.router import ScriptedRouter

__all__ = [
    "Fault",
    "Latency",
    "ScriptedEngine",
    "ScriptedHost",
    "ScriptedRouter",
    "die",
    "drop",
    "freeze",
    "garbage",
    "hang",
    "instead",
    "refuse",
    "slow",
    "truncate",
]
