"""The memory of a job: what lies on each kind of device, at each moment that may be the worst. Pure.

Where engines share the trainer's GPUs, the moments are the turns of `run/turns.py`: the trainer's turn, the handover of
weights, and the engines' turn. Nothing is claimed about a device whose size is not known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from asyncrl.config.architecture import Architecture
from asyncrl.config.checks.served import served_beside
from asyncrl.config.layout import EnginePlacement, ProcessLayout
from asyncrl.config.memory.engine import OFFLOADED_BYTES, EngineMemory, engine_memory
from asyncrl.config.memory.needs import JobMemory, Need, Parts, added
from asyncrl.config.memory.shapes import BYTES, RankShape
from asyncrl.config.memory.trainer import TrainerMemory, trainer_memory
from asyncrl.config.root import Config
from asyncrl.config.sections.inference import EngineConfig, ServingConfig
from asyncrl.config.sections.training import DEFAULT_TOKENS

USABLE = 0.95
"""Share of a GPU that a trainer can count on; the rest is what torch's allocator cannot use for it (assumed) ..."""
USABLE_SHARED = 0.88
"""... and where engines share the GPU, since ranks have no expandable segments then (`config/environment.py`)."""
MOST_TOKENS = 32768
"""Largest packing budget that is chosen by itself. Past it a forward pass gets no faster, only larger."""
_STEP_TOKENS = 256
_LONGEST_TRIED = 1 << 24


@dataclass(frozen=True, slots=True)
class Estimator:
    """Estimates one job on one kind of GPU."""

    config: Config
    layout: ProcessLayout
    model: Architecture
    gpu_bytes: int | None = None
    """Memory of each GPU; None where it is not known, and on CPU."""
    host_bytes: int | None = None
    """Memory of the node of rank 0; None where it is not known."""
    frozen: tuple[Architecture, ...] = ()
    """Models that every rank holds beside the trained one, untrained: a reference, a teacher."""
    beside: Mapping[str, Architecture] = field(default_factory=dict)
    """Models that are served beside the trained one, by name, as far as their shape is known."""

    @property
    def usable_share(self) -> float:
        """Share of its GPU that a trainer rank can count on."""
        return USABLE_SHARED if self.layout.colocated else USABLE

    @property
    def usable(self) -> int | None:
        """What a trainer rank can count on."""
        return None if self.gpu_bytes is None else int(self.gpu_bytes * self.usable_share)

    @property
    def trainer(self) -> TrainerMemory | None:
        """One trainer rank; None where none trains."""
        if self.config.debug.rollout_only:
            return None
        layout = self.layout
        return trainer_memory(
            self.config,
            self.model,
            dtype=layout.dtype,
            device=layout.device,
            data_parallel=layout.data_parallel,
            frozen=self.frozen,
        )

    @property
    def engines(self) -> Mapping[str, tuple[EnginePlacement, EngineMemory]]:
        """Every engine whose model has a known size, by its id, and the memory of one of its ranks."""
        groups: list[tuple[Architecture, EngineConfig | ServingConfig, tuple[EnginePlacement, ...]]]
        groups = [(self.model, self.config.engine, self.layout.engines)]
        served = served_beside(self.config)
        groups += [
            (self.beside[name], served[name][1], placed.engines)
            for name, placed in self.layout.beside.items()
            if name in self.beside
        ]
        return {
            placement.engine_id: (placement, self._engine(model, settings, placement))
            for model, settings, placements in groups
            if "quantization" not in settings.server_args
            for placement in placements
        }

    def _engine(
        self, model: Architecture, settings: EngineConfig | ServingConfig, placement: EnginePlacement
    ) -> EngineMemory:
        return engine_memory(
            model,
            dtype=self.layout.dtype,
            device=self.layout.device,
            ranks=placement.tensor_parallel,
            capacity=self.gpu_bytes,
            settings={"max_total_tokens": settings.max_total_tokens, **settings.server_args},
            colocated=placement.colocated,
        )

    def largest_budget(self) -> int | None:
        """Most tokens of a micro-batch, and so the longest sequence, that one rank can train; None if not known.

        0 where not even the model fits.
        """
        trainer, usable = self.trainer, self.usable
        if trainer is None or usable is None:
            return None
        beside = OFFLOADED_BYTES if self.layout.colocated else 0
        return _largest(lambda tokens: sum(trainer.at(tokens).values()) + beside <= usable)

    def budget(self, longest: int) -> int:
        """The packing budget: what was set, or what fits. `longest`: tokens of the longest sequence that is known.

        Where that one does not fit, it is the budget nevertheless, and the memory does not fit.
        """
        asked, fitting = self.config.train.max_tokens_per_microbatch, self.largest_budget()
        if asked is not None:
            return asked
        if fitting is None:
            return max(DEFAULT_TOKENS, longest) if self.layout.device == "cuda" else DEFAULT_TOKENS
        return max(min(fitting, MOST_TOKENS), longest)

    def memory(self, tokens: int) -> JobMemory:
        """The whole job with micro-batches of `tokens` tokens."""
        placed, trained = self.engines, self.trainer is not None
        return JobMemory(
            devices=tuple(self._needs(tokens, placed)),
            host=self._host(),
            host_bytes=self.host_bytes,
            usable_share=None if self.gpu_bytes is None else self.usable_share,
            tokens=tokens if trained else None,
            longest=self.largest_budget(),
            admitted=self.config.model.context_length or self.model.max_positions,
            kv_tokens={engine_id: memory.kv_tokens for engine_id, (_, memory) in placed.items()},
        )

    def _needs(self, tokens: int, placed: Mapping[str, tuple[EnginePlacement, EngineMemory]]) -> Iterator[Need]:
        trainer, layout = self.trainer, self.layout
        ranks = _numbered([f"rank {rank.rank}" for rank in layout.trainers])
        if trainer is not None and not layout.colocated:
            yield Need(ranks, trainer.at(tokens), self.usable)
        alike: dict[tuple[object, ...], list[str]] = {}
        for engine_id, (engine, memory) in placed.items():
            kind = engine_id.rpartition("-")[0]
            alike.setdefault((kind, engine.colocated, *sorted(memory.parts.items())), []).append(engine_id)
        for names in alike.values():
            engine, memory = placed[names[0]]
            if trainer is not None and engine.colocated:
                yield from self._turns(tokens, trainer, memory, (ranks, _numbered(names)))
            else:
                yield Need(_numbered(names), memory.parts, self.gpu_bytes)

    def _turns(self, tokens: int, trainer: TrainerMemory, engine: EngineMemory, who: tuple[str, str]) -> Iterator[Need]:
        """The moments of GPUs that the trainer and engines share; each of the two stays as a process in all of them."""
        ranks, names = who
        yield Need(f"{ranks}, training", added(trainer.at(tokens), engine.offloaded), self.usable)
        weights: Parts = {"weights": engine.parts["weights"], **engine.offloaded}
        yield Need("handover of weights", added(trainer.handover, weights), self.usable)
        yield Need(f"{names}, serving", added(engine.parts, {"runtime": trainer.runtime}), self.gpu_bytes)
        if self.config.engine.colocate_memory_peak_device == "gpu":
            yield Need("start of the trainer", added(trainer.static, weights), self.usable)

    def _host(self) -> Mapping[str, int]:
        """Host memory on the node of rank 0, when it is most: once everything has run, or at the start."""
        trainer, trainers = self.trainer, self.layout.trainers
        if trainer is None:
            return {}
        ranks = sum(rank.node == trainers[0].node for rank in trainers)
        later = {purpose: size for purpose, size in self._host_later(trainer, ranks) if size}
        start = {"Adam's weights at the start": ranks * trainer.host_at_start}
        return max(later, start, key=lambda purposes: sum(purposes.values()))

    def _host_later(self, trainer: TrainerMemory, ranks: int) -> Iterator[tuple[str, int]]:
        layout, config = self.layout, self.config
        if config.weights.keep_published != "never" and not config.debug.train_only:
            yield "copy of the published weights", RankShape(self.model).parameters * BYTES[layout.dtype]
        if config.checkpoint.every:
            share = -(-(3 * trainer.gradients + trainer.frozen) // layout.data_parallel)  # float32: weights and moments
            yield "copy of a checkpoint", ranks * share + RankShape(self.model).parameters * BYTES[layout.dtype]
        if trainer.on_host:
            yield "Adam's state and its gradients", ranks * trainer.host
        if layout.colocated:
            state = 0 if trainer.on_host else trainer.optimizer
            yield (
                "Adam's state and weights of the ranks in the engines' turn",
                ranks * (state + trainer.weights + trainer.frozen),
            )


def _largest(fits: Callable[[int], bool]) -> int:
    """The largest multiple of `_STEP_TOKENS` that fits; 0 where none does. `fits` is monotone."""
    low, high = 0, _LONGEST_TRIED // _STEP_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * _STEP_TOKENS) else (low, middle - 1)
    return low * _STEP_TOKENS


def _numbered(names: list[str]) -> str:
    """`rank 0`, `rank 0..3`: of processes that are numbered in order."""
    return names[0] if len(names) == 1 else f"{names[0]}..{re.split('[- ]', names[-1])[-1]}"
