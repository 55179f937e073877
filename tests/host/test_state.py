"""The host's decisions under every order of events."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.host.state import (
    SHUTDOWN_S,
    Action,
    Answer,
    AnswerTail,
    HostState,
    KillOrphans,
    Launch,
    Leave,
    Sever,
    TellExit,
    Terminate,
)

NAMES = st.sampled_from(["engine-0", "engine-1"])


class Guardian:
    """What the world knows of one: its process's pid once started, and whether it was told to end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pid = 0
        self.severed = False


class HostMachine(RuleBasedStateMachine):
    """Drives `HostState` with requests, guardians' messages and time in any order, and keeps its books."""

    @initialize()
    def start(self) -> None:
        self.state = HostState()
        self.now = 0.0
        self.last_id = 0
        self.open_requests: set[int] = set()
        self.guardians: dict[int, Guardian] = {}
        self.told_pids: set[int] = set()
        self.exited_pids: set[int] = set()
        self.last_pid = 100
        self.left = False

    def take(self, actions: list[Action]) -> None:
        assert not self.left, "acts after leaving"
        for action in actions:
            match action:
                case Answer(request_id, error, result):
                    self.open_requests.remove(request_id)  # answered once
                    if error is None and "pid" in result:
                        self.told_pids.add(result["pid"])
                case AnswerTail(request_id):
                    self.open_requests.remove(request_id)
                case Launch(serial, spec):
                    assert all(g.name != spec.name for g in self.guardians.values()), "two of one name"
                    self.guardians[serial] = Guardian(spec.name)
                case Terminate(serial):
                    assert self.guardians[serial].pid, "signals what has not started"
                case Sever(serial):
                    assert not self.guardians[serial].severed, "severed twice"
                    self.guardians[serial].severed = True
                case TellExit(_, pid):
                    assert pid in self.told_pids
                    assert pid not in self.exited_pids
                    self.exited_pids.add(pid)
                case Leave():
                    self.left = True
                case KillOrphans():
                    pass

    def ask(self, **message: Any) -> None:
        self.last_id += 1
        self.open_requests.add(self.last_id)
        self.take(self.state.on_request({"id": self.last_id, **message}, self.now))

    here = precondition(lambda self: not self.left)

    @here
    @rule(name=NAMES)
    def spawn(self, name: str) -> None:
        self.ask(op="spawn", name=name, argv=["true"], env={}, log_path="/dev/null", log_bytes=1)

    @here
    @rule(name=NAMES, grace_s=st.floats(0, 10))
    def stop(self, name: str, grace_s: float) -> None:
        self.ask(op="stop", name=name, grace_s=grace_s)

    @here
    @rule(name=NAMES)
    def kill(self, name: str) -> None:
        self.ask(op="kill", name=name)

    @here
    @rule(name=NAMES)
    def tail(self, name: str) -> None:
        self.ask(op="tail", name=name, lines=3)

    @here
    @rule()
    def shutdown(self) -> None:
        self.ask(op="shutdown")

    @here
    @rule()
    def lifeline_closes(self) -> None:
        self.take(self.state.on_lifeline_closed(self.now))

    @here
    @rule(seconds=st.floats(0, 5))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.state.on_time(self.now))

    @precondition(lambda self: self.left)
    @rule()
    def another_host(self) -> None:
        self.start()

    some_guardian = precondition(lambda self: not self.left and self.guardians)

    @some_guardian
    @rule(data=st.data())
    def guardian_starts_its_process(self, data: st.DataObject) -> None:
        waiting = [serial for serial, guardian in self.guardians.items() if not guardian.pid]
        if not waiting:
            return
        serial = data.draw(st.sampled_from(waiting))
        self.last_pid += 1
        self.guardians[serial].pid = self.last_pid
        self.take(self.state.on_guardian(serial, {"started": self.last_pid, "log_start": 0}))

    @some_guardian
    @rule(data=st.data(), killed=st.booleans())
    def guardian_ends(self, data: st.DataObject, killed: bool) -> None:
        serial = data.draw(st.sampled_from(sorted(self.guardians)))
        guardian = self.guardians.pop(serial)
        if not killed:
            last = {"exited": 0, "survivors": 0} if guardian.pid else {"failed": "no"}
            self.take(self.state.on_guardian(serial, last))
        if not self.left:
            self.take(self.state.on_guardian_gone(serial))

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        if not self.guardians:
            assert not self.open_requests
        assert self.told_pids - self.exited_pids == {g.pid for g in self.guardians.values() if g.pid} or self.left

    @invariant()
    def the_end_is_bounded(self) -> None:
        deadline = self.state.next_deadline()
        if any(guardian.severed for guardian in self.guardians.values()) and deadline is not None:
            assert deadline <= self.now + max(SHUTDOWN_S, 10)


HostMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
TestHostMachine = HostMachine.TestCase


def started(state: HostState) -> int:
    (launch,) = state.on_request(
        {"id": 1, "op": "spawn", "name": "e", "argv": ["x"], "env": {}, "log_path": "l", "log_bytes": 1}, 0.0
    )
    assert isinstance(launch, Launch)
    state.on_guardian(launch.serial, {"started": 7, "log_start": 5})
    return launch.serial


def test_stop_is_term_then_a_severed_guardian_at_the_deadline() -> None:
    state = HostState()
    serial = started(state)
    assert state.on_request({"id": 2, "op": "stop", "name": "e", "grace_s": 4}, 10.0) == [Terminate(serial)]
    assert state.next_deadline() == 14.0
    assert state.on_time(13.9) == []
    assert state.on_time(14.0) == [Sever(serial)]
    assert state.on_guardian(serial, {"exited": -9, "survivors": 0}) == [
        TellExit("e", 7, -9, True, 0, "l", 5),
        Answer(2),
    ]


def test_a_closed_lifeline_severs_all_and_leaves_when_they_are_gone() -> None:
    state = HostState()
    serial = started(state)
    assert state.on_lifeline_closed(0.0) == [Sever(serial)]
    assert state.on_lifeline_closed(1.0) == []
    told = TellExit("e", 7, -9, True, 0, "l", 5)
    assert state.on_guardian(serial, {"exited": -9, "survivors": 0}) == [told, Leave()]


def test_a_guardian_that_does_not_end_holds_up_the_end_only_so_long() -> None:
    state = HostState()
    started(state)
    state.on_lifeline_closed(0.0)
    assert state.on_time(SHUTDOWN_S - 0.1) == []
    assert state.on_time(SHUTDOWN_S) == [Leave()]


def test_an_idle_host_leaves_at_once() -> None:
    assert HostState().on_request({"id": 1, "op": "shutdown"}, 0.0) == [Answer(1), Leave()]
