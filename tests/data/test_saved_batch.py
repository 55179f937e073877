from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asyncrl.data.saved_batch import batch_paths, load_batch, save_batch, saved_rollouts
from asyncrl.errors import DataError
from tests.training.worlds import make_batch


def test_a_batch_is_read_back_as_it_was_with_what_was_said_of_it(tmp_path: Path) -> None:
    batch = make_batch(12)
    save_batch(batch, tmp_path, {"what": "the loss is nan"})
    saved = load_batch(tmp_path, 12)
    assert saved.facts == {"what": "the loss is nan"} and saved_rollouts(tmp_path) == (12,)
    for field in dataclasses.fields(batch):
        mine, read = getattr(batch, field.name), getattr(saved.batch, field.name)
        if field.name == "columns":
            assert mine.keys() == read.keys() and all(torch.equal(mine[name], read[name]) for name in mine)
        elif isinstance(mine, torch.Tensor):
            assert torch.equal(mine, read) and mine.dtype == read.dtype
        else:
            assert mine == read, field.name


def _other(path: Path) -> None:
    path.write_text(json.dumps({"format": 2, "batch": {"rollout_id": 1}}))


def _old(path: Path) -> None:
    path.write_text(json.dumps({"batch": json.loads(path.read_text())["batch"]}))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda tensors, rest: rest.unlink(), r"rollout-000001\.json cannot be read: No such file"),
        (lambda tensors, rest: rest.write_text("{"), r"rollout-000001\.json and the tensors"),
        (lambda tensors, rest: _other(rest), r"not a saved batch: 'group_ids'"),
        (lambda tensors, rest: _old(rest), r"rollout-000001\.json has format 1, and this .* reads format 2; save the "),
        (lambda tensors, rest: tensors.write_bytes(b"abc"), "not a saved batch"),
        (lambda tensors, rest: tensors.unlink(), "rollout-000001"),
    ],
)
def test_what_is_no_saved_batch_is_named(tmp_path: Path, damage: Callable[[Path, Path], object], told: str) -> None:
    save_batch(make_batch(1), tmp_path, {})
    damage(*batch_paths(tmp_path, 1))
    with pytest.raises(DataError, match=told):
        load_batch(tmp_path, 1)


def test_a_batch_whose_tensors_are_being_replaced_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a reader would combine the ids of one attempt with the tensors of the next."""
    save_batch(make_batch(1), tmp_path, {})

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("asyncrl.data.saved_batch.save_file", killed)
    with pytest.raises(KeyboardInterrupt):
        save_batch(make_batch(1), tmp_path, {})
    assert saved_rollouts(tmp_path) == ()
    with pytest.raises(DataError, match="cannot be read"):
        saved_rollouts(tmp_path / "nowhere")
