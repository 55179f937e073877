"""Scripted engines, a scripted router and a scripted host: what the fault and scale tests run against.

A scripted engine speaks the engine's HTTP API with real sockets, holds real tensors, joins real gloo groups, and keeps
the real engine's order of locks; only its tokens are made up. Faults are data (`Fault`), set for the nth call of an
endpoint. The pieces: `faults` (what goes wrong, when), `server` (a process's life on a port), `generation` (requests,
pauses, versions), `weights` (tensors, groups), `engine` (the endpoints), `router`, `host`, `answers` (an engine of
which only the answers to requests matter), and `python -m tests.scripted` for engines in a process of their own.
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
