"""The rendezvous store of the transfer group."""

from __future__ import annotations

import os
import time

import psutil
import pytest
from torch._C._distributed_c10d import TCPStore

from asyncrl.weights.transports import process_group
from asyncrl.weights.transports.process_group import DEVICES, TransferGroup, form_all
from tests.weights.fake_nccl import Blocks, FakeStream


def test_the_store_listens_on_the_given_address_alone_and_lets_go_of_it() -> None:
    def listening() -> list[str]:
        connections = psutil.Process(os.getpid()).net_connections("tcp")
        return [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == group.port]

    group = TransferGroup("gloo", "weights", 2, "127.0.0.1", timeout_s=5.0)
    assert listening() == ["127.0.0.1"]
    group.drop()
    assert listening() == []


def test_a_group_that_cannot_be_made_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch raises ValueError for NCCL without a GPU."""
    monkeypatch.setitem(DEVICES, "nccl", "cpu")
    monkeypatch.setattr(process_group, "SendStream", lambda: FakeStream(Blocks()))
    group = TransferGroup("nccl", "weights", 2, "127.0.0.1", timeout_s=5.0)
    engine = TCPStore("127.0.0.1", group.port, 2, is_master=False)
    engine.set("come", "")
    began = time.monotonic()
    form_all([group], timeout_s=5.0)
    assert group.failure is not None and "only supported with GPUs" in group.failure
    assert not group.alive and time.monotonic() - began < 4.0
