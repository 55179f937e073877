"""An engine that does nothing: it answers every POST with the same prepared /generate body, at once or after a delay.

    python benchmarks/noop_engine.py [--tokens 1000] [--latency-s 1 --jitter 0.5] [--cpu 1] [--parent PID]

Prints its port. With `--parent` it ends with that process, in whatever way that ends. It must be faster than the
clients that are measured against it. So it is a bare protocol on uvloop, which finds id and end of a request and
reads nothing else of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio

from asyncrl.host.proc import die_with_parent

VOCABULARY = 151_936
"""Upper bound of the ids. They then have as many digits as those of a current model."""
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_RID = re.compile(rb'"rid": *"([^"]*)"')
_ID = b"ID OF THE REQUEST"
"""Where the id of the request comes in a prepared answer."""
_WORDS = ("the ", "of ", "sum ", "=", " 12", "\n", "so ", "we ", "have ", "x", "²", ". ")


def body(tokens: int) -> bytes:
    """Returns an answer with the engine's fields. Like the engine, it writes float32 log-probs with float64 digits."""
    dice = random.Random(0)
    ids = [dice.randrange(100, VOCABULARY) for _ in range(tokens - 1)] + [VOCABULARY - 1]
    # A trained policy makes two kinds of tokens: almost certain ones and open choices.
    logprobs = [float32(-dice.expovariate(dice.choice((1.5, 1.5, 200.0)))) for _ in range(tokens)]
    answer = {
        "text": "".join(dice.choice(_WORDS) for _ in range(tokens)),
        "output_ids": ids,
        "meta_info": {
            "id": _ID.decode(),
            "finish_reason": {"type": "stop", "matched": VOCABULARY - 1},
            "prompt_tokens": 512,
            "weight_version": "default",
            "weight_versions": [{"version": "default", "start": 0, "end": tokens}],
            "input_token_logprobs": [],
            "output_token_logprobs": [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)],
            "completion_tokens": tokens,
            "cached_tokens": 511,
            "e2e_latency": 1.234567890123456,
        },
    }
    return json.dumps(answer, separators=(",", ":"), ensure_ascii=False).encode()


def float32(value: float) -> float:
    """Rounds to the nearest float32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


class Answering(asyncio.Protocol):
    """One connection. It answers each request, also several that arrive together."""

    def __init__(self, answer: bytes, latency_s: Callable[[], float]) -> None:
        self._before, self._after = answer.split(_ID)
        self._latency_s = latency_s
        self._received = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (head := self._received.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(self._received, 0, head)
            end = head + 4 + (int(length[1]) if length else 0)
            if len(self._received) < end:
                return
            rid = _RID.search(self._received, head, end)
            reply = partial(self._reply, rid[1] if rid else b"")
            self._received = self._received[end:]
            if (latency_s := self._latency_s()) > 0:
                asyncio.get_running_loop().call_later(latency_s, reply)
            else:
                reply()

    def _reply(self, rid: bytes) -> None:
        if not self._transport.is_closing():
            length = len(self._before) + len(rid) + len(self._after)
            self._transport.writelines((_HEAD % length, self._before, rid, self._after))


async def serve(tokens: int, latency_s: float, jitter: float) -> None:
    """Prints the port and serves until the process ends."""
    answer = body(tokens)

    def draw() -> float:
        return latency_s * (1 + jitter * (2 * random.random() - 1))

    server = await asyncio.get_running_loop().create_server(
        lambda: Answering(answer, draw), "127.0.0.1", 0, backlog=8192
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--latency-s", type=float, default=0.0, help="mean time to an answer")
    parser.add_argument("--jitter", type=float, default=0.0, help="latency is uniform in mean * (1 +- jitter)")
    parser.add_argument("--cpu", type=int, help="the core to run on")
    parser.add_argument("--parent", type=int, help="pid of the process with which it ends")
    arguments = parser.parse_args()
    if arguments.parent is not None:
        die_with_parent(arguments.parent)
    if arguments.cpu is not None:
        os.sched_setaffinity(0, {arguments.cpu})
    anyio.run(serve, arguments.tokens, arguments.latency_s, arguments.jitter, backend_options={"use_uvloop": True})


if __name__ == "__main__":
    main()
