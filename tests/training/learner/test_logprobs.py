"""Log-probs and entropies against log_softmax, whole and with the vocabulary split over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.training.learner import logprobs as module
from asyncrl.training.learner.logprobs import token_logprobs
from asyncrl.training.ranks.layout import RankLayout
from tests.training.forked_ranks import run_ranks

TOKENS, VOCAB, PADDED = 7, 13, 16
TEMPERATURE = 0.6


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(TOKENS, PADDED, generator=generator)).to(dtype)
    logits[:, VOCAB:] = 100.0  # padding that must not win
    return logits, torch.tensor([0, 12, 3, 7, 8, 12, 1]), torch.randn(TOKENS, generator=generator)


def expected(dtype: torch.dtype = torch.float32, entropy_weight: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    logits, targets, weights = inputs(dtype)
    leaf = logits.double().requires_grad_()
    scores = (leaf[:, :VOCAB] / TEMPERATURE).log_softmax(-1)
    logprobs = scores.gather(-1, targets[:, None]).squeeze(-1)
    entropies = -(scores.exp() * scores).sum(-1)
    (logprobs * weights + entropy_weight * weights.flip(0) * entropies).sum().backward()
    assert leaf.grad is not None
    return logprobs.detach(), entropies.detach(), leaf.grad


def compute(
    layout: RankLayout, dtype: torch.dtype = torch.float32, entropy_weight: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    logits, targets, weights = inputs(dtype)
    part = logits.chunk(layout.world_size, dim=1)[layout.rank].clone().requires_grad_()
    logprobs, entropies = token_logprobs(
        part,
        targets,
        temperature=TEMPERATURE,
        vocab_size=VOCAB,
        group=dist.group.WORLD if layout.world_size > 1 else None,
        entropy_gradient=entropy_weight > 0,
    )
    assert entropies.requires_grad == (entropy_weight > 0)
    loss = (logprobs * weights).sum()
    if entropy_weight:
        loss = loss + (entropy_weight * weights.flip(0) * entropies).sum()
    loss.backward()
    assert torch.equal(part, logits.chunk(layout.world_size, dim=1)[layout.rank])  # logits are left as they were
    assert part.grad is not None
    return logprobs.detach(), entropies.detach(), part.grad


@pytest.mark.parametrize("entropy_weight", [0.0, 0.7])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("chunk", [1 << 22, 3 * PADDED])
def test_a_split_vocabulary_gives_the_values_and_gradients_of_a_whole_one(
    world_size: int, chunk: int, entropy_weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", chunk)
    asked = (torch.float32, entropy_weight)
    alone = world_size == 1
    results = [compute(RankLayout(0, 1, 0, 1), *asked)] if alone else run_ranks(compute, *asked, world_size=world_size)
    want_logprobs, want_entropies, want_grad = expected(*asked)
    for logprobs, entropies, _ in results:
        assert torch.allclose(logprobs.double(), want_logprobs, atol=1e-5)
        assert torch.allclose(entropies.double(), want_entropies, atol=1e-5)
    grad = torch.cat([grad for _, _, grad in results], dim=1)
    assert torch.allclose(grad.double(), want_grad, atol=1e-5)
    assert (grad[:, VOCAB:] == 0).all()


def compute_with_idle_rank(layout: RankLayout) -> Tensor:
    """Vocabulary of 2 over two ranks of width 2: the second holds padding alone."""
    logits = torch.tensor([[1.0, 2.0], [3.0, 1.0]]) if layout.rank == 0 else torch.full((2, 2), 7.0)
    return token_logprobs(logits, torch.tensor([0, 1]), temperature=1.0, vocab_size=2, group=dist.group.WORLD)[0]


def test_a_rank_that_holds_padding_alone_changes_nothing() -> None:
    want = torch.log_softmax(torch.tensor([[1.0, 2.0], [3.0, 1.0]]), -1)[[0, 1], [0, 1]]
    for logprobs in run_ranks(compute_with_idle_rank, world_size=2):
        assert torch.allclose(logprobs, want)


def test_the_log_probs_and_their_gradient_are_the_same_to_the_last_bit_with_an_entropy_gradient_of_zero() -> None:
    logits, targets, weights = inputs()
    grads = []
    for entropy_gradient in (False, True):
        leaf = logits.clone().requires_grad_()
        logprobs, entropies = token_logprobs(
            leaf, targets, temperature=TEMPERATURE, vocab_size=VOCAB, entropy_gradient=entropy_gradient
        )
        ((logprobs * weights).sum() + (0.0 * entropies.sum() if entropy_gradient else 0.0)).backward()
        grads.append(leaf.grad)
    assert torch.equal(grads[0], grads[1])  # type: ignore[arg-type]


def test_a_certain_distribution_has_an_entropy_gradient_of_zero_and_no_nan() -> None:
    leaf = torch.tensor([[200.0, -200.0, -200.0]], requires_grad=True)
    _, entropies = token_logprobs(leaf, torch.tensor([0]), temperature=1.0, vocab_size=3, entropy_gradient=True)
    entropies.sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [[0.0, 0.0, 0.0]]


def test_bfloat16_logits_are_summed_in_float32() -> None:
    logprobs, entropies, grad = compute(RankLayout(0, 1, 0, 1), torch.bfloat16)
    want_logprobs, want_entropies, want_grad = expected(torch.bfloat16)
    assert grad.dtype == torch.bfloat16
    assert logprobs.dtype == entropies.dtype == torch.float32
    assert torch.allclose(logprobs.double(), want_logprobs, atol=1e-5)
    assert torch.allclose(entropies.double(), want_entropies, atol=1e-5)
    assert torch.allclose(grad.double(), want_grad, atol=2e-2)


def test_no_tokens_are_no_error() -> None:
    logits = torch.zeros(0, VOCAB, requires_grad=True)
    logprobs, entropies = token_logprobs(logits, torch.zeros(0, dtype=torch.int64), temperature=1.0, vocab_size=VOCAB)
    logprobs.sum().backward()
    assert logprobs.shape == entropies.shape == (0,)


class LargestFloat32(TorchDispatchMode):
    """Notes the largest float32 tensor that any operation returns, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.dtype == torch.float32:
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_bfloat16_logits_are_never_float32_all_at_once(entropy_gradient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 10 * VOCAB)
    logits = torch.randn(100, VOCAB).to(torch.bfloat16).requires_grad_()
    with LargestFloat32() as largest:
        logprobs, entropies = token_logprobs(
            logits,
            torch.zeros(100, dtype=torch.int64),
            temperature=1.0,
            vocab_size=VOCAB,
            entropy_gradient=entropy_gradient,
        )
        (logprobs.sum() + (entropies.sum() if entropy_gradient else 0.0)).backward()
    assert largest.elements == max(10 * VOCAB, 3 * 100)  # a chunk, or three sums for each token
