"""Adam on the host, by Megatron's hybrid optimizer, on a CPU that plays the GPU: what was copied to the host is told
from what lies on the device, and streams do their work at once."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor
from torch.overrides import TorchFunctionMode

from asyncrl.training.checkpoints.manifest import SavedLayout
from asyncrl.training.checkpoints.saved_shards import SavedShards
from asyncrl.training.checkpoints.shard import write_snapshots
from asyncrl.training.megatron import cpu_shim
from asyncrl.training.megatron import optimizer as optimizer_module
from asyncrl.training.ranks.layout import RankLayout
from asyncrl.training.roles import ACTOR
from tests.training.forked_ranks import run_ranks
from tests.training.megatron.learners import learner_of, optimizer_of, weights_of
from tests.training.megatron.test_training import TRAIN, assert_same_weights, batch_of


class GpuOfTheCpu(TorchFunctionMode):
    """Tensors are on the GPU unless they were copied to the host."""

    _KEEP = (torch.Tensor.float, torch.Tensor.detach, torch.Tensor.clone, torch.Tensor.pin_memory)

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.is_cuda.__get__:
            return not getattr(args[0], "is_on_host", False)
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.cpu:
            return on_host(args[0].clone())
        if kwargs.pop("pin_memory", False):
            return on_host(func(*args, **kwargs))
        result = func(*args, **kwargs)
        return on_host(result) if func in self._KEEP and getattr(args[0], "is_on_host", False) else result


def on_host(tensor: Tensor) -> Tensor:
    tensor.is_on_host = True  # type: ignore[attr-defined]
    return tensor


class Stream:
    """Whatever is asked of a stream or of its events is done already."""

    def __getattr__(self, name: str) -> Callable[..., Stream]:
        return lambda *_: self


def play_gpu() -> None:
    """In this process, from now on."""
    cpu_shim.install()
    torch.cuda.current_stream = torch.cuda.Stream = Stream  # type: ignore[assignment, misc]
    torch.cuda.stream = contextlib.nullcontext  # type: ignore[assignment, misc]
    torch.cuda.synchronize = torch.cuda.ipc_collect = torch.cuda.empty_cache = lambda: None  # type: ignore[assignment]
    optimizer_module.has_memory_of_its_own = lambda device: True
    GpuOfTheCpu().__enter__()


def learner_with(layout: RankLayout, path: Path, dtype: str, **train: Any) -> Any:
    return learner_of(layout, model={"path": path, "dtype": dtype}, train={**TRAIN, **train})


def train(layout: RankLayout, path: Path, dtype: str, settings: dict[str, Any]) -> Any:
    trainer = learner_with(layout, path, dtype, **settings)
    return [trainer.train(batch_of(step)) for step in range(4)], weights_of(trainer)


def train_on_host(layout: RankLayout, path: Path, checkpoint: Path) -> Any:
    play_gpu()
    trainer = learner_with(layout, path, "bfloat16", optimizer_on_host=True)
    metrics = [trainer.train(batch_of(step)) for step in range(2)]
    write_snapshots({ACTOR: trainer.backend.snapshot()}, checkpoint, layout)
    optimizer_of(trainer).offload(keep_weights=False)  # for engines that share the GPU
    optimizer_of(trainer).onload()
    metrics += [trainer.train(batch_of(step)) for step in range(2, 4)]
    weights = weights_of(trainer)
    held = [
        tensor.is_on_host and tensor.dtype == torch.float32
        for adam in optimizer_of(trainer)._adams()
        for group in adam.param_groups
        for tensor in group["params"]
    ]
    other = learner_with(layout, path, "bfloat16", optimizer_on_host=True)
    dist.barrier()
    saved = SavedLayout(layout.world_size, layout.tensor_parallel)
    other.backend.restore(SavedShards(checkpoint, saved, layout, ACTOR))
    again = [other.train(batch_of(step)) for step in range(2, 4)]
    same = all(torch.equal(weights[name], tensor) for name, tensor in other.backend.export_tensors())
    return metrics, weights, held, again, same


@pytest.mark.parametrize("world", [{"world_size": 2}, {"world_size": 2, "tensor_parallel": 2}], ids=["DP 2", "TP 2"])
def test_adam_on_the_host_trains_and_goes_on_from_a_checkpoint_as_on_the_device(
    model_directory: Any, tmp_path: Path, world: dict[str, int]
) -> None:
    path = model_directory("qwen3-tied")
    on_device = run_ranks(train, path, "bfloat16", {}, **world)
    results = run_ranks(train_on_host, path, tmp_path, **world)
    for (expected, weights), (metrics, got, held, again, same) in zip(on_device, results, strict=True):
        for one, two in zip(expected, metrics, strict=True):
            assert two == pytest.approx(one, rel=1e-5, abs=1e-6)
        assert_same_weights(got, weights, 1e-5)
        assert len(held) > 5 and all(held), "Adam's weights are not on the host in float32"
        assert again == metrics[2:] and same


def optimizers_left(layout: RankLayout, path: Path) -> tuple[int, int]:
    play_gpu()
    gc.disable()
    learner = learner_with(layout, path, "bfloat16", optimizer_on_host=True)
    found = [one for one in gc.get_objects() if isinstance(one, HybridDeviceOptimizer)]
    weights = {id(adam) for one in found for adam in one.sub_optimizers}
    assert weights == {id(adam) for adam in optimizer_of(learner)._adams()}
    return len(found), len(optimizer_of(learner)._parts())


def test_the_copy_of_all_weights_that_the_start_makes_on_the_host_does_not_stay(model_directory: Any) -> None:
    [(found, parts)] = run_ranks(optimizers_left, model_directory("qwen3"))
    assert found == parts, "an optimizer that nobody uses holds weights"


def test_on_a_cpu_there_is_nothing_to_move(model_directory: Any) -> None:
    path = model_directory("qwen3")
    [(expected, _)] = run_ranks(train, path, "float32", {})
    [(metrics, _)] = run_ranks(train, path, "float32", {"optimizer_on_host": True})
    assert metrics == expected
