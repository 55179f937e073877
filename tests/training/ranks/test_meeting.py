"""Ranks meet at one address: who is missing is said on both sides, and no wait ends without a name."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from structlog.testing import capture_logs

from asyncrl.errors import TrainerError
from asyncrl.training.ranks import meeting
from asyncrl.training.ranks.layout import RankEnvironment
from asyncrl.training.ranks.meeting import absent, meet
from tests.training.forked_ranks import meeting_port

SOON_S = 0.2
LATE_S = 60.0


@pytest.fixture(autouse=True)
def told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "FIRST_TOLD_S", SOON_S)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def a_rank(rank: int, world_size: int, port: int, **more: Any) -> RankEnvironment:
    return RankEnvironment(rank, world_size, rank, world_size, "127.0.0.1", port, **more)


@pytest.mark.parametrize(("rank", "missing"), [(0, 1), (1, 0)])
def test_a_lone_rank_says_again_and_again_who_has_not_come_to_which_address_and_ends_with_it(
    rank: int, missing: int
) -> None:
    port = meeting_port()
    began = time.monotonic()
    with capture_logs() as lines, pytest.raises(TrainerError) as failed:
        meet(a_rank(rank, 2, port), 1.5)
    assert time.monotonic() - began < LATE_S / 2
    who = f"trainer rank {missing} has not come to 127.0.0.1:{port}"
    told = [line["event"] for line in lines]
    assert len(told) == 3 and all(line.startswith(f"{who} (waiting 0 s of 1.5 s") for line in told[:2])
    assert str(failed.value).startswith(f"{who} within 1.5 s") and "train.init_timeout_s" in str(failed.value)
    assert ("Connection refused" in str(failed.value)) == (rank == 1)


def test_every_rank_that_has_come_names_those_that_have_not(pool: ThreadPoolExecutor) -> None:
    port = meeting_port()
    with capture_logs() as lines:
        ranks = [pool.submit(meet, a_rank(rank, 5, port), 2.0) for rank in (0, 1, 3)]
        errors = [str(rank.exception(LATE_S)) for rank in ranks]
    who = f"trainer ranks 2, 4 have not come to 127.0.0.1:{port}"
    assert any(error.startswith(f"{who} within 2 s") for error in errors), errors
    assert sum(line["event"].startswith(who) for line in lines) >= 2, "ranks 0 and 1"


def all_met(ranks: list[Future[Any]]) -> list[Any]:
    stores = [rank.result(LATE_S) for rank in ranks]
    stores[0].set("word", "given")
    assert all(store.get("word") == b"given" for store in stores)
    return stores


def test_ranks_wait_for_one_that_is_late_in_whatever_order_they_come(pool: ThreadPoolExecutor) -> None:
    for late in range(3):
        port = meeting_port()
        with capture_logs() as lines:
            ranks = [pool.submit(meet, a_rank(rank, 3, port), LATE_S) for rank in range(3) if rank != late]
            while not any(f"trainer rank {late} has" in line["event"] for line in lines):
                time.sleep(0.01)
            ranks.append(pool.submit(meet, a_rank(late, 3, port), LATE_S))
            all_met(ranks)


def test_ranks_of_an_agent_meet_in_its_store_and_no_attempt_reads_what_the_last_one_left(
    pool: ThreadPoolExecutor,
) -> None:
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LATE_S))
    for restarts in range(2):
        ranks = [a_rank(rank, 2, agent.port, agent_store=True, restarts=restarts) for rank in range(2)]
        with pytest.raises(TrainerError, match="rank 1 has not come"):  # those of the last attempt count for nothing
            meet(ranks[0], 0.5)
        all_met([pool.submit(meet, rank, LATE_S) for rank in ranks])


def test_an_address_that_cannot_be_used_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(TrainerError, match=rf"rank 0 cannot serve at 127\.0\.0\.1:{port}, .*--master-port"):
            meet(a_rank(0, 2, port), LATE_S)
    nowhere = RankEnvironment(1, 2, 1, 2, "no-such-host.invalid", 1)
    with pytest.raises(TrainerError, match=r"rank 0 has not come to no-such-host\.invalid:1 within 0\.5 s: [A-Z]"):
        meet(nowhere, 0.5)


def test_a_rank_zero_that_leaves_before_all_have_come_is_blamed_and_not_a_socket(pool: ThreadPoolExecutor) -> None:
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LATE_S))
    with capture_logs() as lines:
        rank = pool.submit(meet, a_rank(1, 3, agent.port), LATE_S)
        while not lines:
            time.sleep(0.01)
        del agent
        assert "trainer rank 0 has left 127.0.0.1:" in str(rank.exception(LATE_S))


def test_one_rank_of_a_node_speaks_for_it(pool: ThreadPoolExecutor) -> None:
    speakers = []
    for rank, local_rank in ((0, 0), (1, 1), (2, 2), (4, 0), (5, 1)):
        with capture_logs() as lines, pytest.raises(TrainerError):
            meet(RankEnvironment(rank, 8, local_rank, 4, "127.0.0.1", meeting_port()), 0.5)
        speakers += [rank] if lines else []
    assert speakers == [0, 1, 4]
    assert threading.active_count() < 20


def test_of_many_ranks_the_first_are_named() -> None:
    assert absent(range(1, 20), "h:1") == "trainer ranks 1, 2, 3, 4, 5, 6, 7, 8 and 11 more have not come to h:1"
