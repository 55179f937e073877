"""Where tensors wait while engines have the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import TrainerError
from asyncrl.training.megatron import host_memory
from asyncrl.training.megatron.host_memory import HostMemory, apart_from

CPU = torch.device("cpu")
SHAPES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=8)


@given(turns=st.lists(SHAPES, min_size=1, max_size=4))
def test_whatever_goes_comes_back_as_it_was_in_each_turn_and_memory_only_grows_to_the_largest(
    turns: list[list[tuple[int, int]]],
) -> None:
    memory, largest = HostMemory(CPU, block_bytes=256), 0
    for shapes in turns:
        whole = [torch.randn(shape) for shape in shapes]
        views = [tensor.view(-1)[len(tensor) :] for tensor in whole]
        expected = [tensor.clone() for tensor in whole]
        memory.take(whole[::2])
        memory.take([*views, *whole])  # some are away already, some are views of others
        assert all(tensor.untyped_storage().size() == 0 for tensor in whole)
        largest = max(largest, sum(-(-tensor.numel() * 4 // 64) * 64 for tensor in whole))
        memory.give_back()
        memory.give_back()
        assert all(torch.equal(tensor, other) for tensor, other in zip(whole, expected, strict=True))
        assert all(v.untyped_storage()._cdata == t.untyped_storage()._cdata for v, t in zip(views, whole, strict=True))
        assert memory.size_bytes == -(-largest // 256) * 256


def test_what_lies_on_the_host_anyway_does_not_move() -> None:
    memory, moment = HostMemory(torch.device("cuda", 0)), torch.ones(3)
    memory.take([moment])
    memory.give_back()
    assert memory.size_bytes == 0 and torch.equal(moment, torch.ones(3))


def test_state_that_is_a_view_of_weights_is_no_state_of_its_own() -> None:
    weights, own = torch.ones(6), torch.ones(2)
    assert apart_from([weights[2:], own], [weights.view(2, 3)]) == [own]


class Gpu:
    """A device that the tensors of a CPU lie on."""

    type = "cuda"

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


def test_blocks_are_page_locked_and_where_none_are_left_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[bool] = []
    empty = torch.empty

    def fake(*arguments: Any, pin_memory: bool = False, **settings: Any) -> torch.Tensor:
        locked.append(pin_memory)
        if len([pinned for pinned in locked if pinned]) == 2:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*arguments, **settings)

    memory: Any = HostMemory(Gpu(), block_bytes=64)  # type: ignore[arg-type]
    monkeypatch.setattr(host_memory.torch, "empty", fake)
    first, second = torch.arange(16), torch.arange(3)
    with pytest.raises(
        TrainerError, match=r"no page-locked host memory .*64 bytes are taken.*out of memory; give the machine"
    ):
        memory.take([first, second])
    assert torch.equal(first, torch.arange(16)), "it stays where it is"
