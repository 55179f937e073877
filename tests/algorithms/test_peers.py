"""TRL and verl give the same losses and gradients for the same inputs (`benchmarks/peer_losses.py` asked them)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.algorithms.algorithm import role_logprobs
from tests.algorithms.test_policy_gradients import Policy, made, step
from tests.training.batches import make_batch

CASES = json.loads(Path(__file__).with_name("peers.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_a_peer_computes_the_same(case: dict[str, Any]) -> None:
    lengths = case["lengths"]

    def flat(name: str) -> Tensor:
        """Of the response tokens of each sample, one sample after the other."""
        return torch.cat([torch.tensor(row[:n]) for row, n in zip(case[name], lengths, strict=True)]).float()

    batch = make_batch(
        [(1, n) for n in lengths],
        groups=case["groups"],
        rewards=case["rewards"],
        logprobs=flat("old"),
        loss_mask=flat("mask").bool(),
    )

    def spread(name: str) -> Tensor:
        values = torch.zeros(len(batch.tokens))
        values[batch.sampled] = flat(name)
        return values

    batch = replace(batch, columns={role_logprobs("reference"): spread("reference")})
    policy = Policy(spread("logprobs"), spread("old"), torch.zeros(len(batch.tokens)), spread("reference"))
    loss, gradient = step(made(case["algorithm"], **case["settings"]), batch, policy)
    assert loss == pytest.approx(case["loss"], rel=2e-5, abs=2e-6)
    torch.testing.assert_close(gradient[batch.sampled], flat("gradient"), rtol=2e-5, atol=2e-6)
