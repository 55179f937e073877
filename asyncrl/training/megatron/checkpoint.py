"""Moves weights between Hugging Face safetensors and Megatron parameters, one parameter at a time.

Invariants
- An import followed by an export is bit-equal, whatever the tensor-parallel size. A missing, extra or misshapen tensor
  is refused by name.
- An export is collective and never stops half-way on one rank: a rank that cannot write goes on gathering to the end,
  and raises then.
- An exported directory appears whole or not at all.
- No pickle: only safetensors is read.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from asyncrl.config.architecture import Architecture
from asyncrl.data.model_files import safetensors_files
from asyncrl.errors import ModelError
from asyncrl.training.checkpoints.files import end_replacement, replace_directory, sync_directory
from asyncrl.training.megatron import mapping
from asyncrl.training.models.model_directory import MAX_FILE_BYTES, HuggingFaceModel, write_model
from asyncrl.training.ranks.layout import RankLayout
from asyncrl.weights.buckets import TensorSpec

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_NOT_WEIGHTS = re.compile(r".*\.rotary_emb\.inv_freq")
"""Tensors of old checkpoints that the config determines."""


class Checkpoint:
    """The safetensors of a Hugging Face directory, read lazily by name."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._handles: dict[str, Any] = {}
        for file in safetensors_files(directory):
            try:
                handle = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{file} cannot be read: {error}") from None
            self._handles.update(dict.fromkeys(handle.keys(), handle))  # type: ignore[no-untyped-call]

    @property
    def names(self) -> frozenset[str]:
        """The tensors that it holds."""
        return frozenset(self._handles)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return tuple(self._handles[name].get_slice(name).get_shape())

    def dtype(self) -> torch.dtype:
        """The dtype of its first tensor.

        Raises:
            ModelError: it is no float of 16 or 32 bits.
        """
        name = min(self._handles)
        stored = self._handles[name].get_slice(name).get_dtype()
        if stored not in _DTYPES:
            raise ModelError(f"{self.directory}: {name} is {stored}; supported: {', '.join(_DTYPES)}")
        return _DTYPES[stored]

    def tensor(self, name: str) -> Tensor:
        """Reads a tensor into host memory."""
        tensor: Tensor = self._handles[name].get_tensor(name)
        return tensor

    def check(self, expected: dict[str, tuple[int, ...]], *, tied: bool) -> None:
        """Raises ModelError unless the checkpoint holds exactly the tensors `expected`, in those shapes.

        `tied`: the output layer is the embedding. An output layer of its own may be there only if it equals that.
        """
        ignorable = {name for name in self.names if _NOT_WEIGHTS.fullmatch(name)} | ({_HEAD} if tied else set())
        missing = sorted(expected.keys() - self.names)
        extra = sorted(self.names - expected.keys() - ignorable)
        misshapen = [
            f"{name} is {list(self.shape(name))}, not {list(shape)}"
            for name, shape in expected.items()
            if name in self._handles and self.shape(name) != shape
        ]
        problems = [
            f"{what}: {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
            for what, names in (("missing", missing), ("unexpected", extra), ("wrong shape", misshapen))
            if names
        ]
        if problems:
            raise ModelError(f"the weights in {self.directory} do not fit its config.json; {'; '.join(problems)}")
        if tied and _HEAD in self.names and not torch.equal(self.tensor(_HEAD), self.tensor(_EMBEDDING)):
            raise ModelError(
                f"{self.directory}: config.json ties the output layer to the embedding, but {_HEAD} differs from "
                f"{_EMBEDDING}; engines would use the embedding and transformers {_HEAD}. Set tie_word_embeddings to "
                f"false in config.json, or take {_HEAD} out of the file"
            )


class WeightExchange:
    """Moves weights between one rank's model and Hugging Face tensors; every method is collective."""

    def __init__(
        self,
        parameters: dict[str, Tensor],
        architecture: Architecture,
        layout: RankLayout,
        tensor_parallel_group: dist.ProcessGroup,
    ) -> None:
        self._parameters = parameters
        self._architecture = architecture
        self._layout = layout
        self._group = tensor_parallel_group
        self._entries = {name: mapping.entry(name) for name in parameters}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name and shape of every tensor, in export order."""
        return {
            name: mapping.tensor_shape(name, self._architecture)
            for entry in self._entries.values()
            for name in entry.names
        }

    def part_shapes(self) -> dict[str, tuple[int, ...]]:
        """Megatron's name and shape of every parameter, as this rank holds it."""
        return {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}

    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors that `export` yields, in its order."""
        (dtype,) = {parameter.dtype for parameter in self._parameters.values()}
        return tuple(
            TensorSpec(name, str(dtype).removeprefix("torch."), shape) for name, shape in self.shapes().items()
        )

    @torch.no_grad()
    def load(self, checkpoint: Checkpoint) -> None:
        """Copies the checkpoint into the parameters, cast to their dtype.

        Raises:
            ModelError: a tensor is missing, not expected, or of another shape.
        """
        checkpoint.check(self.shapes(), tied=self._architecture.tied_embeddings)
        for name, parameter in self._parameters.items():
            entry = self._entries[name]
            part = mapping.to_megatron(
                entry.kind,
                [checkpoint.tensor(n) for n in entry.names],
                self._architecture,
                rank=self._layout.tensor_parallel_rank,
                ranks=self._layout.tensor_parallel,
            )
            parameter.copy_(part)

    @torch.no_grad()
    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, whole tensor) on every rank, in the order of `specs`.

        A tensor is the live parameter or freshly gathered. It holds until the next training step or offload. All ranks
        must run the iterator to its end, since each step gathers.
        """
        for name, parameter in self._parameters.items():
            entry = self._entries[name]
            shards = [parameter.detach()]
            if entry.kind is not mapping.Kind.REPLICATED and self._layout.tensor_parallel > 1:
                shards = [torch.empty_like(parameter) for _ in range(self._layout.tensor_parallel)]
                dist.all_gather(shards, parameter.detach().contiguous(), group=self._group)
            yield from zip(entry.names, mapping.to_hugging_face(entry.kind, shards, self._architecture), strict=True)

    def export_directory(
        self, source: Path, target: Path, *, dtype: torch.dtype, max_file_bytes: int = MAX_FILE_BYTES
    ) -> None:
        """Writes a Hugging Face directory on rank 0: config and tokenizer files as in `source`, weights as `dtype`.

        It is written beside `target` and then renamed; a `target` that exists is replaced, and is there until then.

        Raises:
            OSError: on rank 0, after all ranks have finished the export; nothing is left behind.
        """
        tensors = self.export()
        try:
            if self._layout.rank == 0:
                staging, aside = (target.parent / f".{target.name}.{what}" for what in ("partial", "replaced"))
                end_replacement(target, aside)
                shutil.rmtree(staging, ignore_errors=True)  # of a job that was killed
                try:
                    write_model(tensors, self.shapes(), source, staging, dtype=dtype, max_file_bytes=max_file_bytes)
                    sync_directory(staging)
                    replace_directory(staging, target, aside)
                finally:
                    shutil.rmtree(staging, ignore_errors=True)
        finally:
            for _ in tensors:
                pass

    def collect(self, source: Path, *, dtype: torch.dtype) -> HuggingFaceModel | None:
        """The whole model as `dtype` in host memory on rank 0, copied; None on the other ranks."""
        first = self._layout.rank == 0
        tensors = {name: t.to(device="cpu", dtype=dtype, copy=True) for name, t in self.export() if first}
        return HuggingFaceModel(tensors, source, dtype) if first else None
