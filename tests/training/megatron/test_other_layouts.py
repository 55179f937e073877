"""A trainer goes on in another layout than that of its checkpoint: no weight and no moment differs by a bit, and the
next losses are those of a trainer that was never stopped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.config import Config
from asyncrl.errors import CheckpointError
from asyncrl.observability.events import EventLog
from asyncrl.training.backends import make_backend
from asyncrl.training.checkpoints.manifest import SavedLayout
from asyncrl.training.checkpoints.restoring import restore
from asyncrl.training.checkpoints.saved_shards import SavedShards
from asyncrl.training.checkpoints.shard import piece_name, write_snapshots
from asyncrl.training.megatron import mapping
from asyncrl.training.megatron.backend import MegatronBackend
from asyncrl.training.megatron.optimizer import set_steps
from asyncrl.training.megatron.shards import WEIGHT
from asyncrl.training.ranks.layout import RankLayout
from asyncrl.training.roles import ACTOR, Role
from asyncrl.training.train_group import TrainGroup
from tests.training.batches import make_batch
from tests.training.forked_ranks import run_ranks
from tests.training.worlds import run_world

LENGTHS = [(5, 9), (3, 30), (17, 2), (1, 12), (8, 9), (2, 2), (20, 14), (6, 6)]
GROUPS = [0, 1, 0, 1, 0, 2, 2, 1]
STEPS = 3
"""Of each layout."""
ONE, TP_2, DP_2 = SavedLayout(1, 1), SavedLayout(2, 2), SavedLayout(2, 1)
CHAIN = (ONE, DP_2, TP_2, ONE, TP_2)
"""Each layout goes on from the checkpoint of the one before."""


def steps(count: int) -> Any:
    """Trains from wherever it begins, and saves what it began with and what three steps made of it.

    Returns the figures of each step, and the reference's log-probs.
    """

    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        start = await group.init()
        if start:
            assert await group.save_checkpoint(start - 1, wait=True)
        figures = []
        for rollout_id in range(start, start + count):
            metrics = await group.train(rollout_id, make_batch(LENGTHS, groups=GROUPS, rollout_id=rollout_id))
            figures.append((metrics["train/loss"], metrics["train/grad_norm"]))
            if rollout_id + 1 == start + STEPS:
                assert await group.save_checkpoint(rollout_id, wait=True)
        return figures, await group.logprobs(make_batch(LENGTHS), role="reference")

    return scenario


def states_of(layout: RankLayout, config: Config, roles: Sequence[Role], paths: list[Path]) -> list[dict[str, Tensor]]:
    """Of each checkpoint: weights, moments and the number of Adam's steps, as one rank would save them."""
    states: list[dict[str, Tensor]] = [{} for _ in paths]
    for role in roles:
        backend = make_backend(config, layout, role)
        backend.init()
        for path, state in zip(paths, states, strict=True):
            restore(backend, path, layout, role.name)
            shard = backend.snapshot().shard
            state[f"{role.name}: steps"] = torch.tensor(list(shard.facts["model"].values()))
            state |= {f"{role.name}: {n}": tensor for n, tensor in shard.tensors.items() if not n.startswith("rng.")}
    return states


def test_each_layout_goes_on_from_the_checkpoint_of_any_other(model_directory: Any, tmp_path: Path) -> None:
    actor = Role(ACTOR, str(model_directory("qwen3")))
    reference = Role("reference", str(model_directory("qwen2-tied")), trained=False)
    model = {"path": actor.model}
    uninterrupted: list[tuple[float, float]] = []
    expected_logprobs = torch.empty(0)
    saved: list[Path] = []
    taken_over: list[Path] = []
    for i, layout in enumerate(CHAIN):
        directory = tmp_path / str(i)
        config: dict[str, Any] = {
            "model": model,
            "run": {"dir": directory},
            "checkpoint": {"resume": saved[-1] if saved else "never"},
            "train": {
                "lr": 1e-3, "weight_decay": 0.1, "grad_clip": 0.5, "minibatches": 2, "max_tokens_per_microbatch": 64,
                "tensor_parallel": layout.tensor_parallel,
            },
        }  # fmt: skip
        scenario = steps(STEPS if i else STEPS * len(CHAIN))
        world: dict[str, Any] = {"config": config, "make_backend": make_backend, "roles": (reference,)}
        figures, logprobs = run_world(scenario, world_size=layout.ranks, timeout_s=120, **world).value
        if i == 0:
            uninterrupted, expected_logprobs = figures, logprobs
        else:
            taken_over.append(directory / f"checkpoints/step-{i * STEPS:06d}")
            expected = torch.tensor(uninterrupted[i * STEPS : (i + 1) * STEPS], dtype=torch.float64)
            difference = (torch.tensor(figures, dtype=torch.float64) - expected).abs()
            assert difference[:, 0].max() < 1e-5 and (difference[:, 1] / expected[:, 1]).max() < 1e-4
            assert torch.allclose(logprobs, expected_logprobs, atol=1e-5, rtol=0)
        saved.append(directory / f"checkpoints/step-{(i + 1) * STEPS:06d}")
    paths = saved[:-1] + taken_over
    [states] = run_ranks(states_of, Config.model_validate({"model": model}), (actor, reference), paths)
    for before, after in zip(states[: len(taken_over)], states[len(taken_over) :], strict=True):
        assert before.keys() == after.keys() and len(before) > 60
        assert [name for name, tensor in before.items() if not torch.equal(tensor, after[name])] == []


def pieces_off(layout: RankLayout, config: Config) -> tuple[list[str], int, int]:
    """Parameters whose saved weights are not those at the saved place of the model; elements saved and in the model."""
    backend = make_backend(config, layout, Role(ACTOR, str(config.model.path)))
    backend.init()
    assert isinstance(backend, MegatronBackend)
    parameters = {mapping.entry(name).name: p.detach() for name, p in backend._weights._parameters.items()}
    shard = backend.snapshot().shard
    off = []
    for name, piece in shard.pieces.items():
        weights = parameters[name].flatten()
        assert piece.size == len(weights)
        held = shard.tensors[piece_name(name, WEIGHT)]
        if held.dtype != torch.float32 or not torch.equal(held, weights[piece.start : piece.stop].float()):
            off.append(name)
    saved = sum(piece.stop - piece.start for piece in shard.pieces.values())
    return off, saved, sum(map(torch.numel, parameters.values()))


def test_ranks_that_share_the_updates_save_each_weight_once_and_in_its_place(model_directory: Any) -> None:
    config = Config.model_validate({"model": {"path": model_directory("qwen2-tied"), "dtype": "bfloat16"}})
    ranks = run_ranks(pieces_off, config, world_size=2)
    assert [off for off, _, _ in ranks] == [[], []]
    assert sum(saved for _, saved, _ in ranks) == ranks[0][2]


def test_the_step_count_lies_where_each_adam_keeps_it() -> None:
    parameter = torch.nn.Parameter(torch.empty(3, device="meta"))
    for where, settings in (("cpu", {}), ("meta", {"fused": True}), ("meta", {"capturable": True})):
        adam = torch.optim.AdamW([parameter])
        group = adam.param_groups[0] | settings
        set_steps(adam, group, parameter, 7)
        step = adam.state[parameter]["step"]
        assert (step.device.type, step.dtype, step.dim()) == (where, torch.float32, 0) and "step" not in group
    counts_by_group = torch.optim.SGD([parameter])  # as Transformer Engine's Adam does, which is none of torch's
    set_steps(counts_by_group, group, parameter, 7)
    assert group["step"] == 7 and not counts_by_group.state


def refusal(layout: RankLayout, path: Path, trained: bool) -> str:
    """Why a backend does not take a shard of a role that was trained, or frozen, as the other."""
    config = Config.model_validate({"model": {"path": path.parent / "model"}})
    for role in (Role("critic", str(config.model.path), trained=t) for t in (trained, not trained)):
        backend = make_backend(config, layout, role)
        backend.init()
        if role.trained == trained:
            write_snapshots({"critic": backend.snapshot()}, path, layout)
    with pytest.raises(CheckpointError) as refused:
        backend.restore(SavedShards(path, ONE, layout, "critic"))
    return str(refused.value)


def test_a_frozen_role_is_not_resumed_as_a_trained_one_nor_the_reverse(model_directory: Any, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(model_directory("qwen3-tied"))
    [frozen], [trained] = (run_ranks(refusal, tmp_path / str(t), t) for t in (False, True))
    assert "no state of Adam: it was written by a job in which this role was frozen" in frozen
    assert "this role is frozen, and the checkpoint was written by a job that trained it" in trained
