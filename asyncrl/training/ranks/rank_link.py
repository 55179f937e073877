"""The rank link: a TCP connection between rank 0 and each other rank, which works when a collective does not.

A rank that waits in a collective can neither be asked nor answer. So answers, tracebacks and signs of life travel over
this connection, from a daemon thread of each rank to the event loop of rank 0; and so do the handles of tensors that
engines read from a rank (`weights/handover.py`).

Invariants
- Rank 0 knows that a rank died as soon as the kernel closes its connection, before any collective times out. It knows
  that a rank went silent (stopped, node lost) after SILENCE_S.
- When rank 0's end closes, every other rank ends: on its own, or after ORPHAN_GRACE_S by os._exit.
- The port asks for a token that only the ranks of this job know; it travels through the rendezvous store.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.abc
import anyio.streams.buffered
import msgspec
import structlog

from asyncrl.tasks import Changes
from asyncrl.training.checkpoints.manifest import Wrote
from asyncrl.training.ranks.trainer_thread import thread_stack
from asyncrl.weights.handover import Desk, Offer, Stopped, Taken

BEAT_S = 2.0
SILENCE_S = 60.0
ORPHAN_GRACE_S = 2.0
_MAX_LINE_BYTES = 64 << 20
"""An offer has some 100 bytes for each tensor of its bucket."""
_TELL_S = 5.0
"""How long a rank may take to accept a message about its tensors; one that is stopped accepts it without reading."""
_FRAMES = 8
_MAX_TEXT = 20_000
"""Characters of one field of a forwarded log record."""

_log = structlog.get_logger(__name__)


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message of a rank."""

    rank: int
    pid: int
    token: str


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The rank is alive."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """Command `seq` succeeded on this rank."""

    seq: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The rank failed and will do nothing more."""

    seq: int
    error: str
    """Name of the exception's class."""
    message: str
    frames: str
    """Last frames of the traceback."""


class Stack(msgspec.Struct, frozen=True, tag=True):
    """Where the rank's main thread is."""

    frames: str


class Said(msgspec.Struct, frozen=True, tag=True):
    """A log record of the rank, of level warning or higher, which rank 0 logs as its own."""

    record: dict[str, str | float]
    """Fields of the log record; `level` and `event` are among them."""


class AskStack(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 wants a Stack."""


class End(msgspec.Struct, frozen=True, tag=True):
    """The job is over; leave."""


_FromRank = Hello | Beat | Done | Failed | Stack | Said | Wrote | Offer
_ToRank = AskStack | End | Taken | Stopped
_decode_from_rank = msgspec.json.Decoder(_FromRank).decode
_decode_to_rank = msgspec.json.Decoder(_ToRank).decode


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """The address that ranks connect to."""

    host: str
    port: int
    token: str

    def encode(self) -> str:
        """As text, for the rendezvous store."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> LinkAddress:
        """Reads what `encode` wrote."""
        return msgspec.json.decode(text, type=cls)


@dataclass(frozen=True, slots=True)
class RankFailure:
    """Why a rank is lost."""

    rank: int
    error: str
    """Class of the exception, or the fate of the process."""
    message: str
    frames: str = ""
    died: bool = False
    """The process ended or went silent without reporting an exception."""

    def __str__(self) -> str:
        parts = (f"trainer rank {self.rank}", self.error, self.message)
        text = ": ".join(part for part in parts if part)
        return f"{text}\n{self.frames.rstrip()}" if self.frames else text


def describe(rank: int, error: BaseException) -> RankFailure:
    """An exception as data, with its notes and the innermost frames of its traceback."""
    frames = "".join(traceback.format_tb(error.__traceback__)[-_FRAMES:])
    message = " ".join([str(error), *getattr(error, "__notes__", ())])
    return RankFailure(rank, type(error).__name__, message, frames)


class LinkServer:
    """Rank 0's end; lives in its event loop."""

    def __init__(
        self, ranks: range, on_change: Callable[[], None], on_wrote: Callable[[int, Wrote], None] = lambda *_: None
    ) -> None:
        self.done: dict[int, int] = dict.fromkeys(ranks, -1)
        """By rank: the last command that it finished."""
        self.failures: list[RankFailure] = []
        """In the order in which they became known."""
        self.stacks: dict[int, str] = {}
        self._on_change = on_change
        self._on_wrote = on_wrote
        self._on_offer: Callable[[int, Offer], None] = lambda *_: None
        self._streams: dict[int, anyio.abc.SocketStream] = {}
        self._answered = Changes()
        self._ending = False
        self._token = secrets.token_hex(16)

    async def serve(self, host: str, *, task_status: anyio.abc.TaskStatus[LinkAddress]) -> None:
        """Accepts ranks until it is cancelled; `started` is called with the address."""
        async with await anyio.create_tcp_listener(local_host=host, local_port=0) as listener:
            port: int = listener.extra(anyio.abc.SocketAttribute.local_port)
            task_status.started(LinkAddress(host, port, self._token))
            await listener.serve(self._serve_rank)

    async def ask_stacks(self, timeout_s: float) -> None:
        """Asks every rank where its main thread is, and fills `stacks` with the answers that come in time."""
        self.stacks.clear()
        await self._tell(AskStack(), timeout_s, self._streams)
        with anyio.move_on_after(timeout_s):
            while not self.stacks.keys() >= self._streams.keys():
                await self._answered.wait()

    async def end(self, timeout_s: float) -> None:
        """Tells every rank to leave. From now on a closed connection is no failure."""
        self._ending = True
        await self._tell(End(), timeout_s, self._streams)

    def listen(self, take: Callable[[int, Offer], None]) -> None:
        """See `asyncrl.weights.handover.OtherRanks`, which this is."""
        self._on_offer = take

    async def tell(self, ranks: Collection[int], message: Taken | Stopped) -> None:
        """See `asyncrl.weights.handover.OtherRanks`."""
        await self._tell(message, _TELL_S, ranks)

    def expect_leave(self) -> None:
        """A command has told the ranks to leave. From now on a closed connection is no failure."""
        self._ending = True

    async def _tell(self, message: _ToRank, timeout_s: float, ranks: Collection[int]) -> None:
        line = msgspec.json.encode(message) + b"\n"
        with anyio.move_on_after(timeout_s, shield=True):
            for stream in [stream for rank, stream in self._streams.items() if rank in ranks]:
                with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                    await stream.send(line)

    async def _serve_rank(self, stream: anyio.abc.SocketStream) -> None:
        rank: int | None = None
        buffered = anyio.streams.buffered.BufferedByteReceiveStream(stream)
        try:
            async with stream:
                while True:
                    with anyio.fail_after(SILENCE_S):
                        line = await buffered.receive_until(b"\n", _MAX_LINE_BYTES)
                    message = _decode_from_rank(line)
                    if isinstance(message, Hello):
                        if not secrets.compare_digest(message.token, self._token) or message.rank not in self.done:
                            return
                        rank = message.rank
                        self._streams[rank] = stream
                    elif rank is None:
                        return
                    else:
                        self._take(rank, message)
        except TimeoutError:
            self._lose(rank, f"no sign of life for {SILENCE_S:g} s: it is stopped or its machine is gone")
        except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError):
            self._lose(rank, "its process ended (killed, or crashed without a traceback)")
        except (msgspec.DecodeError, anyio.DelimiterNotFound) as error:
            self._lose(rank, f"it sent something unreadable: {error}")
        finally:
            if rank is not None:
                self._streams.pop(rank, None)

    def _take(self, rank: int, message: _FromRank) -> None:
        match message:
            case Done(seq=seq):
                self.done[rank] = seq
            case Failed(error=error, message=text, frames=frames):
                self.failures.append(RankFailure(rank, error, text, frames))
            case Stack(frames=frames):
                self.stacks[rank] = frames
                self._answered.notify()
            case Wrote():
                self._on_wrote(rank, message)
                return
            case Offer():
                self._on_offer(rank, message)
                return
            case Said(record=record):
                fields: dict[str, Any] = dict(record)
                level = logging.getLevelNamesMapping().get(str(fields.pop("level", "")).upper(), logging.WARNING)
                event = fields.pop("event", "")
                _log.log(level, event, **{**fields, "rank": rank})
                return
            case _:
                return
        self._on_change()

    def _lose(self, rank: int | None, reason: str) -> None:
        if rank is None or self._ending or any(f.rank == rank for f in self.failures):
            return
        self.failures.append(RankFailure(rank, reason, "", died=True))
        self._on_change()


class LinkClient:
    """A rank's end, with two daemon threads: one sends signs of life, the other listens to rank 0."""

    def __init__(self, address: LinkAddress, rank: int, timeout_s: float) -> None:
        self.ended = threading.Event()
        """Set when rank 0 has said that the job is over, or is gone."""
        self.desk = Desk(self.send)
        """Where this rank offers tensors to engines."""
        self._orderly = False
        self._main_thread = threading.current_thread()
        self._lock = threading.Lock()
        self._socket = socket.create_connection((address.host, address.port), timeout=timeout_s)
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.send(Hello(rank, os.getpid(), address.token))
        for target in (self._beat, self._listen):
            threading.Thread(target=target, name=f"rank-link-{target.__name__}", daemon=True).start()

    def send(self, message: _FromRank) -> None:
        """Sends a message. Never raises: where rank 0 is gone, `ended` is set."""
        line = msgspec.json.encode(message) + b"\n"
        with self._lock, suppress(OSError):
            self._socket.sendall(line)

    def say(self, record: Mapping[str, Any]) -> bool:
        """Has rank 0 log `record`; returns False when rank 0 is gone or has ended the job."""
        if self.ended.is_set():
            return False
        shown = {k: v if isinstance(v, float | int) else str(v)[:_MAX_TEXT] for k, v in record.items()}
        self.send(Said(shown))
        return True

    def close(self) -> None:
        """Ends the link in order: the listening thread will not end the process."""
        self.ended.set()
        self._orderly = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _beat(self) -> None:
        while not self.ended.wait(BEAT_S):
            self.send(Beat())

    def _listen(self) -> None:
        with suppress(OSError), self._socket.makefile("rb") as lines:
            for line in lines:
                match _decode_to_rank(line):
                    case End():
                        break
                    case AskStack():
                        self.send(Stack(thread_stack(self._main_thread, _FRAMES)))
                    case Taken() | Stopped() as message:
                        self.desk.hear(message)
        self.ended.set()
        time.sleep(ORPHAN_GRACE_S)
        if not self._orderly:
            _log.error("this trainer rank ends itself: rank 0 is gone or gave up, and the main thread is stuck")
            os._exit(1)
