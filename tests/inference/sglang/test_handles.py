"""The handles of tensor handover as SGLang's own deserializer reads them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.utils.common import MultiprocessingSerializer
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket, FlattenedTensorMetadata
from torch import Tensor
from torch.multiprocessing import reductions

from asyncrl.weights.handover import Desk, Handover, Offer, Taken
from asyncrl.weights.transfer import BucketFiller
from asyncrl.weights.transports.tensor_sink import TensorSink, pickle_handles
from tests.weights.fakes import random_tensors, specs_of

GPUS = ("GPU-a", "GPU-b", "GPU-c")


def test_a_bucket_is_a_flattened_bucket_of_sglang_whatever_dtypes_are_in_it() -> None:
    tensors = random_tensors() | {"odd": torch.arange(3, dtype=torch.bfloat16)}
    offers: list[Offer] = []

    def taken(offer: Offer) -> None:
        offers.append(offer)
        read = MultiprocessingSerializer.deserialize(offer.handles)
        names = ("name", "shape", "dtype", "start_idx", "end_idx", "numel")
        places = [FlattenedTensorMetadata(**{n: getattr(place, n) for n in names}) for place in read["metadata"]]
        bucket = FlattenedTensorBucket(flattened_tensor=read["flattened_tensor"], metadata=places)
        found.update((name, tensor.clone()) for name, tensor in bucket.reconstruct_tensors())
        desk.hear(Taken(1, offer.bucket))

    found: dict[str, Tensor] = {}
    desk = Desk(taken)
    sink = TensorSink(BucketFiller(specs_of(tensors), 1 << 16), Handover(1, (0,), 1 << 16, 5.0), 0, desk)
    for name, tensor in tensors.items():
        sink.put(name, tensor)
    sink.finish()
    assert len(offers) > 1 and found.keys() == tensors.keys()
    assert all(found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in found.items())


class OnGpu(Tensor):
    """A tensor that says that it lies on a GPU."""

    is_cuda = True


def test_a_handle_names_the_gpu_so_that_an_engine_with_another_mask_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    visible = list(GPUS)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=visible[index]))

    def reduce(tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
        device = (2, b"handle", 64, 0, b"counter", 0, b"event", True)
        return reductions.rebuild_cuda_tensor, (
            *(Tensor, tensor.size(), tensor.stride(), 0, torch.UntypedStorage, tensor.dtype),
            *(*device[:4], False, *device[4:]),
        )

    monkeypatch.setattr(reductions, "reduce_tensor", reduce)
    handle = pickle_handles({"flattened_tensor": torch.zeros(4, dtype=torch.uint8).as_subclass(OnGpu)})

    opened: list[int] = []
    monkeypatch.setattr(reductions, "init_reductions", lambda: None)
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda *arguments: opened.append(arguments[6]))
    for name in ("_reduce_tensor_original", "_rebuild_cuda_tensor_original"):  # as if nothing was patched before
        monkeypatch.setattr(reductions, name, None, raising=False)
        monkeypatch.delattr(reductions, name)
    monkey_patch_torch_reductions()
    visible[:] = [GPUS[2]]  # what the engine sees
    MultiprocessingSerializer.deserialize(handle)
    visible[:] = [GPUS[1], GPUS[2]]
    MultiprocessingSerializer.deserialize(handle)
    assert opened == [0, 1]
    visible[:] = [GPUS[0]]
    with pytest.raises(Exception, match="Invalid device_uuid=GPU-c"):
        MultiprocessingSerializer.deserialize(handle)
