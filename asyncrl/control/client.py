"""The command's side: finds the job that runs in a directory and puts a request to it. Synchronous."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from asyncrl.control.protocol import (
    ANSWER_BYTES,
    CarriedOut,
    Health,
    Refused,
    Request,
    line_of,
    read_answer,
    short_path,
)
from asyncrl.errors import ControlError
from asyncrl.run_directory import control_socket, running_job

CONNECT_TIMEOUT_S = 5.0


def ask(run: Path, request: Request, timeout_s: float) -> Health | CarriedOut:
    """The answer of the job that runs in directory `run`, waited for at most `timeout_s`.

    Raises RunDirectoryError when no job runs there, ControlError when it cannot be reached, does not answer or refuses.
    """
    pid = running_job(run)
    job = f"the job in {run} (process {pid})"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(CONNECT_TIMEOUT_S)
        try:
            with short_path(control_socket(run)) as name:
                connection.connect(name)
            with suppress(BrokenPipeError):  # a job that is too busy answers before it has read the request
                connection.sendall(line_of(request))
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise ControlError(f"{job} takes no commands now: it is starting or about to end; try again") from error
        except PermissionError as error:
            raise ControlError(f"{job} belongs to another user, and takes commands from that one only") from error
        except OSError as error:  # TimeoutError is one
            raise ControlError(f"{job} cannot be reached: {error}") from error
        line = _receive(connection, job, timeout_s)
    if not line:
        raise ControlError(f"{job} ended before it answered; `asyncrl report {run}` says how")
    try:
        answer = read_answer(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ControlError(f"{job} gave an answer that this asyncrl does not know; is it another version?") from error
    if isinstance(answer, Refused):
        raise ControlError(answer.message)
    return answer


def _receive(connection: socket.socket, job: str, timeout_s: float) -> bytes:
    """The answer's line; empty when the job closed the connection without one. Raises ControlError."""
    deadline, line = time.monotonic() + timeout_s, b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            received = connection.recv(1 << 16)
        except TimeoutError as error:
            raise ControlError(
                f"{job} gave no answer within {timeout_s:g} s; it goes on with the command, see `asyncrl health`"
            ) from error
        except OSError:  # reset by its end
            return b""
        line += received
        if not received:
            return b""
        if len(line) > ANSWER_BYTES:
            raise ControlError(f"{job} gave an answer of more than {ANSWER_BYTES} bytes; is it another version?")
    return line
