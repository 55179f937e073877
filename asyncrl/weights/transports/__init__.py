"""Ways of moving weights: broadcast over a process group, a directory on disk, shared memory on one host."""

from __future__ import annotations

from typing import Literal

import torch

from asyncrl.config import Config
from asyncrl.data.model_files import weights_bytes
from asyncrl.weights.buckets import bucket_size
from asyncrl.weights.copies import weights_directory
from asyncrl.weights.transfer import EngineOpener, Transport
from asyncrl.weights.transports.broadcast import BroadcastTransport
from asyncrl.weights.transports.disk import DiskTransport
from asyncrl.weights.transports.tensor import TensorTransport

_MIB = 1 << 20


def make_transport(
    config: Config, kind: Literal["broadcast", "tensor", "disk"], *, open_engine: EngineOpener
) -> Transport:
    """The transport of a job. Its process layout chose `kind`, and resolved `auto`."""
    bucket_bytes = bucket_bytes_of(config)
    timeout_s = config.weights.timeout_s
    # An engine that is paused in place refuses to flush: its cache holds the KV of running requests.
    flush_cache = config.weights.on_update != "in_place"
    match kind:
        case "broadcast":
            return BroadcastTransport(
                open_engine,
                backend="nccl" if torch.cuda.is_available() else "gloo",
                host=config.run.host,
                bucket_bytes=bucket_bytes,
                timeout_s=timeout_s,
                flush_cache=flush_cache,
            )
        case "tensor":
            return TensorTransport(open_engine, bucket_bytes=bucket_bytes, timeout_s=timeout_s, flush_cache=flush_cache)
        case "disk":
            return DiskTransport(
                open_engine,
                directory=weights_directory(config) / "transfer",
                bucket_bytes=bucket_bytes,
                timeout_s=timeout_s,
                flush_cache=flush_cache,
            )


def bucket_bytes_of(config: Config) -> int:
    """Size of a transfer bucket: `weights.bucket_mib`, or what fits the model and this rank's GPU."""
    if config.weights.bucket_mib is not None:
        return config.weights.bucket_mib * _MIB
    gpu_bytes = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    return bucket_size(weights_bytes(config.model.path), gpu_bytes)


__all__ = ["bucket_bytes_of", "make_transport"]
