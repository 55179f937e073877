"""How many requests are in flight where nobody says: what the engines take together. Pure."""

from __future__ import annotations

from asyncrl.config.root import Config

PER_ENGINE = 256
"""Requests in flight for each engine whose own limit is not set. SGLang captures CUDA graphs for up to 256 requests on
GPUs from 60 GB on; more are decoded without. On CPU, where an engine decodes 128, the others keep it from standing
still between two requests."""

_FILES_PER_REQUEST = 2
"""Sockets of the router for a request in flight: one to the client, one to the engine."""
_OTHER_FILES = 128
"""What a router or a driver opens beside its requests; 30 to 60 counted."""


def files_for(requests: int) -> int:
    """Open files that the router needs for so many requests in flight."""
    return _FILES_PER_REQUEST * requests + _OTHER_FILES


def most_requests(open_files: int) -> int:
    """Most requests in flight that a router with so many open files can hold, at least 1."""
    return max(1, (open_files - _OTHER_FILES) // _FILES_PER_REQUEST)


def concurrency_of(config: Config, engines: int, open_files: int | None) -> int:
    """`rollout.concurrency`, or what so many `engines` take together, at most what `open_files` allow (None: any)."""
    if config.rollout.concurrency is not None:
        return config.rollout.concurrency
    together = max(1, engines) * (config.engine.max_running_requests or PER_ENGINE)
    return together if open_files is None else min(together, most_requests(open_files))


def planned_engines(config: Config) -> int:
    """Engines of the trained model as the configuration names them; those that GPUs have room for are not counted."""
    return (config.engine.num_engines or 0) + len(config.engine.external) or 1
