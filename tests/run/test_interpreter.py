"""What the interpreter of a driver does by itself, and when."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.run import interpreter
from asyncrl.run.pauses import Pauses, ToldFleet
from tests.contracts.fake_controller import FakeController


class Cycle:
    def __init__(self) -> None:
        self.me = self


@contextmanager
def collections() -> Iterator[list[int]]:
    """The generation of each collection in the body."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    try:
        yield seen
    finally:
        gc.callbacks.remove(note)


def test_what_start_up_made_is_visited_no_more() -> None:
    made = [Cycle() for _ in range(10_000)]
    interpreter.settle()
    assert gc.get_freeze_count() > len(made) and len(gc.get_objects()) < len(made)


def test_what_thousands_of_requests_hold_causes_no_collection() -> None:
    interpreter.settle()
    with collections() as seen:
        held = [Cycle() for _ in range(90_000)]  # each with a dictionary
    assert seen == [] and len(held) == 90_000


def test_a_pause_without_garbage_does_not_walk_through_the_frozen_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter.settle()
    for name in ("collect", "get_freeze_count", "get_objects"):  # each visits every one of them
        monkeypatch.setattr(gc, name, lambda: pytest.fail("the engines stand still meanwhile"))
    interpreter.tidy()


def test_garbage_does_not_pile_up_without_an_update_of_the_weights() -> None:
    interpreter.settle()
    last: set[weakref.ref[Cycle]] = set()
    with collections() as seen:
        for _ in range(2_000_000):
            last.add(weakref.ref(Cycle(), last.discard))
    assert seen and len(last) < 250_000


def test_the_lock_comes_back_from_a_thread_that_computes_within_a_millisecond() -> None:
    interpreter.settle()
    assert sys.getswitchinterval() < 0.001


@pytest.mark.anyio
async def test_garbage_goes_while_engines_are_paused() -> None:
    told: list[str] = []

    executor = SimpleNamespace(
        engines_paused=lambda: told.append("paused"), engines_resumed=lambda: told.append("resumed")
    )
    pauses = Pauses()
    pauses.add(executor)  # type: ignore[arg-type]
    fleet = ToldFleet(FakeController(), pauses)
    interpreter.settle()
    garbage = [Cycle() for _ in range(20_000)]
    weakref.finalize(garbage[0], told.append, "collected")
    garbage.clear()
    lease = await fleet.begin_weight_update("0.0")
    await fleet.abort_weight_update(lease.lease_id, {}, untouched=True)
    assert told == ["paused", "collected", "resumed"]


def test_a_pause_is_not_made_longer_for_next_to_nothing() -> None:
    interpreter.settle()
    with collections() as seen:
        made = [Cycle() for _ in range(1_000)]
        interpreter.tidy()
    assert seen == [] and len(made) == 1_000


def test_before_there_is_a_loop_collections_are_as_usual() -> None:
    gc.collect()
    gc.disable()
    try:
        made = [Cycle() for _ in range(20_000)]
        with collections() as seen:
            interpreter.tidy()
    finally:
        gc.enable()
    assert seen == [] and len(made) == 20_000
