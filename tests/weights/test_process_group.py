"""The rendezvous store of the transfer group."""

from __future__ import annotations

import os

import psutil

from asyncrl.weights.transports.process_group import TransferGroup


def test_the_store_listens_on_the_given_address_alone_and_lets_go_of_it() -> None:
    def listening() -> list[str]:
        connections = psutil.Process(os.getpid()).net_connections("tcp")
        return [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == group.port]

    group = TransferGroup("gloo", "weights", 2, "127.0.0.1", timeout_s=5.0)
    assert listening() == ["127.0.0.1"]
    group.drop()
    assert listening() == []
