"""Rewards of a user, good and bad, for the tests of how they are run."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np

from asyncrl.data.sample import Prompt, Sample


def good(sample: Sample, prompt: Prompt, *, bonus: float = 0.0) -> float:
    return float(sample.text == prompt.answer) + bonus


async def good_async(sample: Sample, prompt: Prompt, *, bonus: float = 0.0) -> float:
    await anyio.lowlevel.checkpoint()
    return good(sample, prompt, bonus=bonus)


partly_bound = partial(good_async, bonus=2.0)


def raises(sample: Sample, prompt: Prompt) -> float:
    raise ValueError("no idea")


async def raises_async(sample: Sample, prompt: Prompt) -> float:
    raise TimeoutError("mine")


def endless(sample: Sample, prompt: Prompt) -> float:
    while True:
        pass


async def endless_async(sample: Sample, prompt: Prompt) -> float:
    await anyio.sleep_forever()
    return 0.0


def stubborn(sample: Sample, prompt: Prompt) -> float:
    """Ignores every signal that can be ignored."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        pass


def dies(sample: Sample, prompt: Prompt) -> float:
    os._exit(7)


def exits(sample: Sample, prompt: Prompt) -> float:
    raise SystemExit(3)


def in_main_thread(sample: Sample, prompt: Prompt) -> float:
    """SIGALRM, which math libraries use for their time limits, works in the main thread only."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    return float(threading.current_thread() is threading.main_thread())


def by_text(sample: Sample, prompt: Prompt) -> float:
    """Does what the response says."""
    return {"hang": endless, "die": dies, "raise": raises}.get(sample.text, good)(sample, prompt)


def garbles(sample: Sample, prompt: Prompt, *, what: str) -> float:
    """Writes into every socket that it finds, for a response "garble"."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the descriptor of the listing itself is closed
            if sample.text == "garble" and os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                os.write(fd, bytes.fromhex(what))
    return 1.0


def forks(sample: Sample, prompt: Prompt) -> float:
    """Both come back from it."""
    return float(os.fork() > 0)


def endless_by_text(sample: Sample, prompt: Prompt) -> float:
    while sample.text == "hang":
        pass
    return float(sample.text == "yes")


def returns(sample: Sample, prompt: Prompt, *, what: str) -> Any:
    values: dict[str, Any] = {
        "nan": float("nan"),
        "inf": float("inf"),
        "none": None,
        "text": "1.0",
        "list": [1.0],
        "true": True,
        "float32": np.float32(0.5),
        "scalar": np.array(0.25),
        "beyond float32": -1e39,
        "rounds to infinity": 3.4028235677973366e38,
        "largest": 3.4028234e38,
        "beyond float64": 10**400,
        "scored": {"score": 0.5, "format": np.float32(1), "found": "42"},
        "rewarded": {"reward": 0.25, "length": 7},
        "summed": {"correct": 1, "format": 0.25},
        "a part beyond": {"score": 1.0, "length": 1e39},
        "no score": {"correct": "yes", "format": 1.0},
        "score is text": {"score": "1", "format": 1.0},
        "empty": {},
        "coroutine": good_async(sample, prompt),
    }
    if what != "coroutine":
        values["coroutine"].close()
    return values[what]


def sees(sample: Sample, prompt: Prompt) -> float:
    """1 when everything arrived as it was sent by `test_rewards.sample_of`."""
    return float(
        sample.output_ids.tolist() == [4, 5]
        and sample.output_ids.dtype == np.int32
        and np.allclose(sample.logprobs, [-0.5, -1.5])
        and sample.versions[0].version == "0.1"
        and prompt.prompt_id == "p:0"
        and prompt.token_ids.tolist() == [1, 2, 3]
        and prompt.record == {"nested": {"list": [1, None, "x"]}}
    )


def loops_in_math(sample: Sample, prompt: Prompt) -> float:
    """What a pathological answer does to a symbolic checker."""
    return float(len(str(9**9**8)))


def where(sample: Sample, prompt: Prompt, *, file: str) -> float:
    """Leaves its process id, so that a test can look for it."""
    Path(file).write_text(str(os.getpid()))
    return 1.0


may_return = threading.Event()


def hangs_until_told(sample: Sample, prompt: Prompt) -> float:
    may_return.wait()
    return 1.0


async def awaits_cancelled(sample: Sample, prompt: Prompt) -> float:
    """What a request that several samples share comes to when the sample that made it runs out of time."""
    shared = asyncio.get_running_loop().create_future()
    shared.cancel()
    return float(await shared)


async def awaits_cancelled_while_cancelled(sample: Sample, prompt: Prompt) -> float:
    """Both at once: its own cancellation finds it at work, and then it meets the other's."""
    with suppress(anyio.get_cancelled_exc_class()):
        await anyio.sleep_forever()
    return await awaits_cancelled(sample, prompt)


def raises_cancelled(sample: Sample, prompt: Prompt) -> float:
    raise asyncio.CancelledError


def ranks(samples: Sequence[Sample], prompt: Prompt, *, bonus: float = 0.0) -> list[float | None]:
    """The share of samples that are not longer; abstains from empty ones, and does what the first one says."""
    by_text(samples[0], prompt)
    lengths = [len(sample.text) for sample in samples]
    return [sum(n <= other for other in lengths) / len(samples) + bonus if n else None for n in lengths]


async def ranks_async(samples: Sequence[Sample], prompt: Prompt) -> np.ndarray:
    await anyio.lowlevel.checkpoint()
    return np.arange(len(samples), dtype=np.float32)


def returns_for_group(samples: Sequence[Sample], prompt: Prompt, *, what: str) -> Any:
    nan = float("nan")
    return {"number": 1.0, "few": [1.0], "many": itertools.count(), "text": "abc", "nan": [1.0, nan, "x"]}[what]


async def exits_async(sample: Sample, prompt: Prompt) -> float:
    await anyio.lowlevel.checkpoint()
    raise SystemExit(3)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def raises_unprintable(sample: Sample, prompt: Prompt) -> float:
    raise Unprintable


async def raises_unprintable_async(sample: Sample, prompt: Prompt) -> float:
    raise Unprintable


def interrupts(sample: Sample, prompt: Prompt) -> float:
    raise KeyboardInterrupt


async def interrupts_async(sample: Sample, prompt: Prompt) -> float:
    raise KeyboardInterrupt


def closes_its_sockets(sample: Sample, prompt: Prompt, *, how: str, file: str) -> float:
    """For a response "close", and lives on; leaves its process id."""
    if sample.text == "close":
        Path(file).write_text(str(os.getpid()))
        if how == "execv":
            os.execv("/bin/sleep", ["sleep", "3600"])
        os.closerange(3, 1024)
        time.sleep(3600)
    return 1.0
