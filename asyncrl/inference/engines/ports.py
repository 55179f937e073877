"""The ports of one engine, as sglang 0.5.23 binds them on one node without data parallelism (`PortArgs.init_new`).

- `--port`: HTTP, metrics included. `--nccl-port`: the rendezvous of its ranks.
- `--engine-info-bootstrap-port`: bound only where weights are seeded through a transfer engine. Its default is 6789.
- from `--port` + 233 on: another rendezvous and six message sockets, bound only with DP attention. They are reserved
  all the same.
- numbers that the kernel chooses, which never collide: gloo, and a message queue between tensor-parallel ranks.
- Unix sockets in TMPDIR for the messages between tokenizer, scheduler and detokenizer.

Other ports (gRPC, gated launch, disaggregation) have to be asked for, and the configuration refuses them.
"""

from __future__ import annotations

from dataclasses import dataclass

_DERIVED_DELTA = 233
"""SGLang's ZMQ_TCP_PORT_DELTA."""
_DERIVED_COUNT = 8
"""Rendezvous, six message sockets of which one is unused, and one spare."""

OFFSETS = (0, 1, 2, *range(_DERIVED_DELTA, _DERIVED_DELTA + _DERIVED_COUNT))
"""Every port that an engine may bind, counted from its first one."""


@dataclass(frozen=True, slots=True)
class EnginePorts:
    """The ports of one engine that its command line names."""

    http: int
    nccl: int
    bootstrap: int

    @classmethod
    def from_base(cls, base: int) -> EnginePorts:
        """The ports of an engine whose `OFFSETS` are free from `base` on."""
        return cls(http=base, nccl=base + 1, bootstrap=base + 2)
