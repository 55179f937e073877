"""A reward worker: `python -m asyncrl.rollout.rewards.worker SOCKET`, one call at a time, in the main thread.

SOCKET is the name of an abstract Unix socket. The main thread matters: time limits by SIGALRM (math-verify, sympy
helpers) work nowhere else. There is no event loop and no torch here. The process ends when the socket does; when a call
hangs, the driver kills it.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from asyncrl.errors import RewardError, describe_exception
from asyncrl.rollout.rewards.frames import HEADER, ScoreCall, ScoreOutcome, Setup, Started, frame, samples_and_prompt
from asyncrl.rollout.rewards.registry import RewardFunction, load_reward
from asyncrl.rollout.rewards.result import failed
from asyncrl.served import declare_models


def main(socket_name: str) -> None:
    """Connects to the driver, imports the function that it names, and answers calls until the socket closes."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(f"\0{socket_name}")
    setup_body = _receive(connection)
    if setup_body is None:
        return
    setup = msgspec.msgpack.decode(setup_body, type=Setup)
    os.chdir(setup.directory)
    sys.path.extend(path for path in setup.import_path if path not in sys.path)
    declare_models(setup.models)
    try:
        reward = load_reward(setup.function, setup.args, setup.scope)
    except RewardError as error:
        connection.sendall(frame(Started(str(error))))
        return
    connection.sendall(frame(Started(None)))
    _be_first_to_go()
    decoder, own_pid = msgspec.msgpack.Decoder(ScoreCall), os.getpid()
    while (body := _receive(connection)) is not None:
        outcome = _score(reward, decoder.decode(body))
        if os.getpid() != own_pid:  # the function forked, and its child came back from it too
            os._exit(0)
        connection.sendall(frame(outcome))


def _be_first_to_go() -> None:
    """A function that eats all memory shall cost its own worker, which is replaced, and no engine or trainer."""
    with suppress(OSError):  # where /proc cannot be written the kernel picks by size
        Path("/proc/self/oom_score_adj").write_text("1000")


def _score(reward: RewardFunction, call: ScoreCall) -> ScoreOutcome:
    samples, prompt = samples_and_prompt(call)
    try:
        scores = reward.judge(reward(samples, prompt), len(samples))
    except Exception as error:  # whatever the user's function raises is the outcome of these samples
        scores = failed(len(samples), describe_exception(error))
    return ScoreOutcome(call.number, scores)


def _receive(connection: socket.socket) -> bytes | None:
    """The next frame's body, or None when the driver has gone."""
    header = _receive_exactly(connection, HEADER.size)
    return None if header is None else _receive_exactly(connection, HEADER.unpack(header)[0])


def _receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    received = bytearray()
    while len(received) < size:
        part = connection.recv(size - len(received))
        if not part:
            return None
        received += part
    return bytes(received)


if __name__ == "__main__":
    main(sys.argv[1])
