"""Batches and their trainers: each trainer gets and commits each batch once, in whatever order the others do."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl.data.sample import Prompt
from asyncrl.errors import RolloutError
from asyncrl.rollout.scheduling.deliveries import Deliveries
from asyncrl.rollout.scheduling.group import Group, Issue

BATCHES = [(Group(Issue(step, Prompt("p", "", np.empty(0, np.int32)), 0), step),) for step in range(3)]
"""Each of one group."""


def test_several_trainers_get_and_commit_the_same_batch_each_for_itself() -> None:
    deliveries = Deliveries(("actor", "critic"))
    with pytest.raises(RolloutError, match="no trainer 'judge' was named to the executor, but actor, critic"):
        deliveries.check_deliverable(0, "judge")
    deliveries.deliver(0, BATCHES[0], "actor")
    with pytest.raises(RolloutError, match="rollout 0 was never delivered"):
        deliveries.commit(0, "critic")
    with pytest.raises(RolloutError, match="rollout 0 was already delivered"):
        deliveries.check_deliverable(0, "actor")
    assert deliveries.commit(0, "actor") is None
    for again in (lambda: deliveries.check_deliverable(0, "actor"), lambda: deliveries.commit(0, "actor")):
        with pytest.raises(RolloutError, match="rollout 0 was already committed"):
            again()
    with pytest.raises(RolloutError, match="delivered and not committed"):
        deliveries.check_all_committed()
    assert deliveries.share(0, "critic") is False
    assert deliveries.commit(0, "critic") == BATCHES[0]
    deliveries.check_all_committed()
    for trainer in ("actor", "critic"):
        with pytest.raises(RolloutError, match="rollout 0 was already committed"):
            deliveries.check_deliverable(0, trainer)


def with_the_actor(*rollout_ids: int) -> Deliveries:
    """The actor has got these batches, and committed none."""
    deliveries = Deliveries(("actor", "critic"))
    for rollout_id in rollout_ids:
        deliveries.deliver(rollout_id, BATCHES[rollout_id], "actor")
    return deliveries


def test_where_one_of_several_trainers_ends_the_books_of_the_others_stay_open() -> None:
    deliveries = with_the_actor(0, 1, 2)
    deliveries.share(0, "critic")
    deliveries.share(1, "critic")
    deliveries.commit(0, "critic")
    deliveries.commit(1, "critic")
    assert deliveries.settle(1, "actor") == BATCHES[0]
    assert deliveries.settle(1, "actor") is None
    with pytest.raises(RolloutError, match="rollout 1 was delivered and not committed"):
        deliveries.check_all_committed()
    with pytest.raises(RolloutError, match="no trainer 'judge' was named to the executor, but actor, critic"):
        deliveries.settle(1, "judge")
    with pytest.raises(RolloutError, match="rollout 2 was already"):
        deliveries.check_deliverable(2, "critic")
    assert deliveries.commit(1, "actor") == BATCHES[1], "only 2 was taken back: the critic may have learnt from 1"
    deliveries.check_all_committed()

    deliveries = with_the_actor(0)
    assert deliveries.settle(1, "actor") is None, "the critic did not even get it"
    with pytest.raises(RolloutError, match="rollout 0 was delivered and not committed"):
        deliveries.check_all_committed()


def test_get_and_commit_out_of_order_are_errors_that_say_so() -> None:
    deliveries = Deliveries()
    with pytest.raises(RolloutError, match="rollout 0 was never delivered"):
        deliveries.commit(0)
    deliveries.deliver(0, BATCHES[0])
    with pytest.raises(RolloutError, match="rollout 0 was already delivered"):
        deliveries.deliver(0, [])
    deliveries.commit(0)
    with pytest.raises(RolloutError, match="rollout 0 was already committed"):
        deliveries.commit(0)
    with pytest.raises(RolloutError, match="rollout 0 was already committed"):
        deliveries.check_deliverable(0)


def test_batches_that_were_committed_are_forgotten_and_still_refused() -> None:
    deliveries = Deliveries()
    for step in range(7, 1000):
        deliveries.deliver(step, BATCHES[0])
        deliveries.commit(step)
    assert not deliveries._open and deliveries._delivered == range(7, 1000)
    with pytest.raises(RolloutError, match="rollout 500 was already committed"):
        deliveries.check_deliverable(500)
    deliveries.check_deliverable(6)
