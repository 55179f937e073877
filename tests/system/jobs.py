"""Whole jobs as a user starts them, in processes of their own, and what is left of them afterwards."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "entrypoints" / "train.py"
MARK = "ASYNCRL_TEST_JOB"

RECIPE = """
[run]
dir = "{run}"
display = "plain"
[model]
path = "{model}"
[data]
source = "{data}"
chat_template = false
[rollout]
prompts_per_step = 4
samples_per_prompt = 4
max_new_tokens = 16
[reward]
function = "length"
workers = 0
args.target = 8
[train]
num_steps = {steps}
lr = 1e-4
[engine]
max_total_tokens = 16384
max_running_requests = 64
"""


def write_recipe(
    directory: Path, model: Path, *, steps: int = 3, prompts: int = 64, engine_url: str | None = None, extra: str = ""
) -> Path:
    """A small job on a tiny model: recipe, prompts, and a run directory, all under `directory`.

    `engine_url`: an external engine, in place of one that the job starts.
    """
    data = directory / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"count {i}", "answer": str(i)}) + "\n" for i in range(prompts)))
    recipe = directory / "recipe.toml"
    external = "" if engine_url is None else f'external = ["{engine_url}"]\n'
    recipe.write_text(RECIPE.format(run=directory / "run", model=model, data=data, steps=steps) + external + extra)
    return recipe


def command_line(process: psutil.Process) -> list[str]:
    """Of a process that may have ended by now: nothing."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def environment(process: psutil.Process) -> dict[str, str]:
    """Likewise."""
    try:
        return process.environ()
    except psutil.NoSuchProcess:
        return {}


@dataclass
class StartedJob:
    """A job in progress; `process` is the torchrun agent, or rank 0 itself without torchrun."""

    process: subprocess.Popen[str]
    mark: str
    run_dir: Path
    output: Path
    ports: set[int] = field(default_factory=set)
    _inode: int = 0
    """Of the event log that was read last; how far, and what stands there."""
    _read: int = 0
    _events: list[dict[str, Any]] = field(default_factory=list)

    def members(self) -> list[psutil.Process]:
        """Every living process of the job, by the mark in its environment."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def events(self) -> list[dict[str, Any]]:
        """All so far. A line is read once: whoever waits for one asks ten times a second, beside the job."""
        path = self.run_dir / "events.jsonl"
        if not path.exists():
            return []
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_ino != self._inode:  # the run before was replaced
                self._inode, self._read, self._events = os.fstat(file.fileno()).st_ino, 0, []
            file.seek(self._read)
            lines, end, _ = file.read().rpartition(b"\n")
        if end:
            self._read += len(lines) + 1
            self._events += [json.loads(line) for line in lines.splitlines()]
        return list(self._events)

    def wait_for(self, what: str, condition: Callable[[], object], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"the job ended before {what}:\n{self.text()}"
            assert time.monotonic() < deadline, f"no {what} after {timeout_s} s:\n{self.text()}"
            time.sleep(0.1)

    def wait_for_event(self, kind: str, timeout_s: float, **fields: Any) -> None:
        self.wait_for(
            f"{kind} {fields or ''}",
            lambda: any(e["kind"] == kind and fields.items() <= e.items() for e in self.events()),
            timeout_s,
        )

    def rank_zero(self) -> psutil.Process:
        """The driver: the member whose command line runs the entrypoint directly."""
        mine = [p for p in self.members() if str(TRAIN) in command_line(p)[1:3]]
        [driver] = [p for p in mine if environment(p).get("RANK", "0") == "0"]
        return driver

    def rank(self, number: int) -> psutil.Process:
        """A trainer rank under torchrun."""
        ranks = [p for p in self.members() if environment(p).get("RANK") == str(number)]
        [found] = [p for p in ranks if "/entrypoints/" in " ".join(command_line(p)[1:3])]
        return found

    def kill_all(self) -> None:
        """SIGKILL to every process of the job at once, as when its machine loses power."""
        while members := self.members():
            for member in members:
                try:
                    member.kill()
                except psutil.NoSuchProcess:
                    continue
        self.process.wait(timeout=30)

    def note_ports(self) -> None:
        """Remembers every port that the job listens on now."""
        for process in self.members():
            try:
                self.ports |= {c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
            except psutil.NoSuchProcess:
                continue

    def text(self) -> str:
        return self.output.read_text()[-8000:]

    def assert_nothing_is_left(self, within_s: float) -> float:
        """Seconds until no process of the job lived; its ports must be free then."""
        started = time.monotonic()
        while left := self.members():
            assert time.monotonic() - started < within_s, (
                f"left after {within_s} s: {[command_line(p)[:4] for p in left]}"
            )
            time.sleep(0.1)
        for port in self.ports:
            assert (holder := holder_of(port)) is None, f"port {port} of the job is held by {holder}"
        return time.monotonic() - started


def holder_of(port: int) -> str | None:
    """Who listens on `port` of this machine although nobody can bind it; None when it is free.

    A client of somebody else that the kernel has put on this port meanwhile is no listener: such a port is free.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            listening = [c for c in psutil.net_connections("tcp") if c.laddr.port == port and c.status == "LISTEN"]
            return str(listening) if listening else None
    return None


@contextmanager
def job(
    recipe: Path,
    *options: str,
    torchrun: int | None = None,
    max_restarts: int = 0,
    env: Mapping[str, str] | None = None,
    entry: Path = TRAIN,
) -> Iterator[StartedJob]:
    """Starts the job; with `torchrun` ranks under its agent, which restarts them so often.

    Whatever is left at the end is killed by pid.
    """
    mark = uuid.uuid4().hex
    output = recipe.parent / f"output-{mark[:6]}.txt"
    launcher = (
        []
        if torchrun is None
        else [
            *("-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(torchrun), "--max-restarts", str(max_restarts)),
        ]
    )
    with output.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, *launcher, str(entry), "@", str(recipe), *options],
            stdout=stream,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(env or {})},
            start_new_session=True,
        )
    started = StartedJob(process, mark, recipe.parent / "run", output)
    try:
        yield started
    finally:
        for member in started.members():
            try:
                member.kill()
            except psutil.NoSuchProcess:
                continue
        process.wait(timeout=30)


def run(recipe: Path, *options: str, timeout_s: float, **how: Any) -> tuple[int, str, StartedJob]:
    """Runs a job to its end; returns exit code and output."""
    with job(recipe, *options, **how) as started:
        code = started.process.wait(timeout=timeout_s)
        started.assert_nothing_is_left(within_s=15)
        return code, started.output.read_text(), started


def refused(recipe: Path, *options: str, timeout_s: float = 120, **how: Any) -> str:
    """Runs a job to its failure, which is one message and leaves nothing; returns that message."""
    code, output, _ = run(recipe, *options, timeout_s=timeout_s, **how)
    assert code not in (0, -9), output
    # Of ours: an engine's own, in the last lines of its log, is indented.
    assert not any(line.startswith("Traceback") for line in output.splitlines()), output
    assert sum(line.startswith("error: ") for line in output.splitlines()) == 1, output
    return output[output.index("error: ") :]
