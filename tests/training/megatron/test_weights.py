"""What goes in comes out, and means the same as in transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncrl.errors import ModelError
from asyncrl.training.learner.learner import Learner
from asyncrl.training.megatron import checkpoint
from asyncrl.training.models import model_directory as model_directory_module
from asyncrl.training.ranks.layout import RankLayout
from tests.training.batches import make_batch, split_samples
from tests.training.forked_ranks import RankFailure, run_ranks
from tests.training.megatron.conftest import MODELS, reference, write_model
from tests.training.megatron.learners import learner_of, weights_of

LENGTHS = [(5, 9), (3, 30), (17, 1), (1, 12), (8, 9), (2, 2), (60, 40)]


def trainer_of(layout: RankLayout, path: Path, **train: Any) -> Learner:
    return learner_of(layout, model={"path": path}, train=train)


def load_and_export(layout: RankLayout, path: Path, temperature: float) -> tuple[Tensor, dict[str, Tensor], Any]:
    trainer = trainer_of(layout, path, max_tokens_per_microbatch=64)
    logprobs = trainer.logprobs(make_batch(LENGTHS, temperature=temperature))
    specs = {spec.name: (spec.dtype, spec.shape) for spec in trainer.backend.tensor_specs()}
    return logprobs, weights_of(trainer), specs


def reference_logprobs(path: Path, temperature: float) -> Tensor:
    model, parts = reference(path), []
    for tokens, prompt in split_samples(make_batch(LENGTHS)):
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1].double() / temperature
        parts.append(logits.log_softmax(-1).gather(-1, tokens[1:, None]).squeeze(-1)[prompt - 1 :])
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("kind", "tensor_parallel"), [*((kind, 1) for kind in MODELS), ("qwen3", 2), ("qwen2-tied", 2)]
)
def test_logprobs_and_weights_equal_those_of_transformers(
    model_directory: Any, kind: str, tensor_parallel: int
) -> None:
    path, temperature = model_directory(kind), 0.7
    expected = reference_logprobs(path, temperature)
    stored = load_file(path / "model.safetensors")
    for logprobs, exported, specs in run_ranks(
        load_and_export, path, temperature, world_size=tensor_parallel, tensor_parallel=tensor_parallel
    ):
        sampled = make_batch(LENGTHS).sampled
        assert (logprobs[sampled] - expected).abs().max() < 1e-5 and not logprobs[~sampled].any()
        assert exported.keys() == stored.keys()
        assert all(torch.equal(exported[name], stored[name]) for name in stored)
        assert specs == {name: ("float32", tuple(tensor.shape)) for name, tensor in exported.items()}
        assert list(specs) == list(exported)


def export_directory(layout: RankLayout, path: Path, target: Path, max_file_bytes: int) -> None:
    weights = trainer_of(layout, path).backend._weights
    weights.export_directory(path, target, dtype=torch.bfloat16, max_file_bytes=max_file_bytes)
    weights.export_directory(path, target, dtype=torch.bfloat16, max_file_bytes=max_file_bytes)  # replaces


def test_an_export_in_several_files_is_the_checkpoint_it_came_from(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", "qwen2-tied", dtype=torch.bfloat16, max_shard_size="40KB")
    assert len(list(source.glob("*.safetensors"))) > 1
    target = tmp_path / "target"
    run_ranks(export_directory, source, target, 40_000, world_size=2, tensor_parallel=2)
    assert len(list(target.glob("*.safetensors"))) > 1
    assert (target / "tokenizer_config.json").read_text() == "{}"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    before, after = checkpoint.Checkpoint(source), checkpoint.Checkpoint(target)
    assert before.names == after.names
    for name in before.names:
        assert after.tensor(name).dtype == torch.bfloat16
        assert torch.equal(before.tensor(name), after.tensor(name))
    reference(target)  # transformers finds nothing missing or left over


def export_onto_a_full_disk(layout: RankLayout, path: Path, target: Path) -> str:
    trainer = trainer_of(layout, path)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    model_directory_module.write_tensors = full
    outcome = "finished"
    try:
        trainer.backend.export_hf(target)
    except OSError as error:
        outcome = str(error)
    trainer.logprobs(make_batch([(2, 3)]))  # the ranks are still in step
    return outcome


def test_a_rank_that_cannot_write_keeps_the_others_in_step_and_leaves_nothing_behind(
    model_directory: Any, tmp_path: Path
) -> None:
    outcomes = run_ranks(
        export_onto_a_full_disk, model_directory("qwen3"), tmp_path / "target", world_size=2, tensor_parallel=2
    )
    assert outcomes == ["[Errno 28] No space left on device", "finished"]
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_a_kill_interrupted_leaves_the_former_one_until_the_next_is_complete(
    model_directory: Any, tmp_path: Path
) -> None:
    target, source = tmp_path / "target", model_directory("qwen3")
    former = tmp_path / ".target.replaced"  # killed between two renames
    former.mkdir()
    (former / "config.json").write_text("the former one")
    (tmp_path / ".target.partial").mkdir()
    run_ranks(export_onto_a_full_disk, source, target)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert (target / "config.json").read_text() == "the former one"
    run_ranks(export_directory, source, target, 40_000_000)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert checkpoint.Checkpoint(target).names == checkpoint.Checkpoint(source).names


def _without_a_tensor(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors")


def _with_a_stranger(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, "model.layers.0.self_attn.sinks": torch.zeros(4)}, path / "model.safetensors")


def _with_a_larger_vocabulary(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "vocab_size": 128}))


def _with_garbage(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"\xff" * 64)


def _with_a_broken_index(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text('{"weight_map": ["model.safetensors"]}')


def _with_a_file_missing(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": "gone.safetensors"}}')


def _with_quantised_numbers(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    save_file({n: t.to(torch.float8_e4m3fn) for n, t in tensors.items()}, path / "model.safetensors")


def _with_a_pickle(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without_a_tensor, "missing: model.layers.1.mlp.up_proj.weight"),
        (_with_a_stranger, "unexpected: model.layers.0.self_attn.sinks"),
        (_with_a_larger_vocabulary, "model.embed_tokens.weight is [101, 48], not [128, 48]"),
        (_with_garbage, "model.safetensors cannot be read"),
        (_with_a_broken_index, "model.safetensors.index.json is not a safetensors index"),
        (_with_a_file_missing, "gone.safetensors cannot be read"),
        (_with_quantised_numbers, "is F8_E4M3; supported: F32, BF16, F16"),
        (_with_a_pickle, "other weight formats are not read"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    model_directory: Any, tmp_path: Path, damage: Any, message: str
) -> None:
    path = tmp_path / "model"
    shutil.copytree(model_directory("qwen3"), path)
    damage(path)
    with pytest.raises(RankFailure) as failure:
        run_ranks(trainer_of, path)
    assert ModelError.__name__ in str(failure.value)
    assert message in str(failure.value)


def _head_of_its_own(path: Path, differs: bool) -> None:
    tensors = load_file(path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    head[-1, -1] += float(differs)
    save_file({**tensors, "lm_head.weight": head}, path / "model.safetensors")


@pytest.mark.parametrize("differs", [True, False])
def test_an_output_layer_that_differs_from_the_embedding_it_is_tied_to_is_refused(
    model_directory: Any, tmp_path: Path, differs: bool
) -> None:
    path = tmp_path / "model"
    shutil.copytree(model_directory("qwen3-tied"), path)
    _head_of_its_own(path, differs)
    if not differs:
        run_ranks(load_and_export, path, 1.0)
        return
    with pytest.raises(
        RankFailure, match=r"lm_head\.weight differs from model\.embed_tokens\.weight; engines"
    ) as failure:
        run_ranks(load_and_export, path, 1.0)
    assert ModelError.__name__ in str(failure.value)
