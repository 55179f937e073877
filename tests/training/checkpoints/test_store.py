"""The directory of checkpoints: what is intact, what is refused and by which name, and what a kill leaves."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from asyncrl.errors import CheckpointError
from asyncrl.training.checkpoints.manifest import SavedLayout, SavedTensor
from asyncrl.training.checkpoints.restoring import restore
from asyncrl.training.checkpoints.saved_shards import SavedShards
from asyncrl.training.checkpoints.shard import Shard, Snapshot, write_snapshots
from asyncrl.training.checkpoints.store import CheckpointStore, check_extra, read_checkpoint, resume_from
from asyncrl.training.models.model_directory import HuggingFaceModel
from asyncrl.training.ranks.layout import RankLayout
from asyncrl.weights.buckets import TensorSpec
from tests.training.forked_ranks import fork_server

LAYOUT = SavedLayout(1, 1)
SHARD = "trainer/actor/rank-00000-of-00001.safetensors"


def save(
    root: Path,
    step: int,
    *,
    number: int = 1,
    layout: SavedLayout = LAYOUT,
    size: int = 10,
    attempt: int = 0,
    model: HuggingFaceModel | None = None,
) -> Path:
    store = CheckpointStore(root)
    staging = store.staging(step, number)
    staging.mkdir(parents=True)
    tensors = {"weight": torch.full((size,), float(step))}
    files = write_snapshots({"actor": Snapshot(Shard(tensors, {"step": step}), model)}, staging, RankLayout(0, 1, 0, 1))
    return store.publish(
        staging,
        files,
        step=step,
        attempt=attempt,
        layout=layout,
        roles={"actor": {"weight": SavedTensor("float32", (size,))}},
        extra={"ledger.json": b"ledger of %d" % step},
        config=f"step = {step}\n",
    )


def test_what_was_saved_last_is_found_with_the_files_of_others(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "checkpoints").newest() is None
    save(tmp_path, 3)
    save(tmp_path, 6)
    found = CheckpointStore(tmp_path).newest()
    assert found is not None
    assert (found.path, found.step, found.extra) == (tmp_path / "step-000006", 6, {"ledger.json": b"ledger of 6"})
    assert found.manifest.roles == {"actor": {"weight": SavedTensor("float32", (10,))}}
    assert found.config == (found.path / "config.toml").read_text() == "step = 6\n"


def test_a_checkpoint_that_keeps_no_configuration_is_read_all_the_same(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    manifest = msgspec.json.decode((path / "manifest.json").read_bytes())
    del manifest["files"]["config.toml"]
    (path / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    (path / "config.toml").unlink()
    found = CheckpointStore(tmp_path).newest()
    assert found is not None and (found.step, found.config) == (3, None)


def test_after_a_set_back_the_newest_is_the_one_written_last(tmp_path: Path) -> None:
    for step in (3, 6, 4):
        save(tmp_path, step)
    found = CheckpointStore(tmp_path).newest()
    assert found is not None and found.step == 4


def test_a_checkpoint_of_the_same_step_replaces_the_former_one(tmp_path: Path) -> None:
    save(tmp_path, 3)
    save(tmp_path, 3, size=20)
    found = CheckpointStore(tmp_path).newest()
    assert found is not None and found.manifest.roles["actor"]["weight"].shape == (20,)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000003"]


def _cut(path: Path) -> None:
    os.truncate(path / SHARD, 20)


def _flip(path: Path) -> None:
    data = bytearray((path / SHARD).read_bytes())
    data[-1] ^= 1
    (path / SHARD).write_bytes(data)


def _garble(path: Path) -> None:
    (path / "manifest.json").write_text((path / "manifest.json").read_text()[:-20])


def _from_the_future(path: Path) -> None:
    manifest = msgspec.json.decode((path / "manifest.json").read_bytes())
    (path / "manifest.json").write_bytes(msgspec.json.encode({**manifest, "format": 99}))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "it has no manifest.json"),
    "cut manifest": (_garble, "manifest.json is damaged"),
    "other format": (_from_the_future, "has format 99; this version of asyncrl reads format 3"),
    "empty manifest": (lambda path: (path / "manifest.json").write_text("{}"), "has format None"),
    "missing file": (lambda path: (path / SHARD).unlink(), f"{SHARD}: No such file or directory"),
    "cut file": (_cut, f"{SHARD} has 20 bytes, not "),
    "flipped bit": (_flip, f"the contents of {SHARD} are not what was written"),
    "emptied": (lambda path: [shutil.rmtree(path), path.mkdir()], "it has no manifest.json"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_newest_intact_one_taken(tmp_path: Path, kind: str) -> None:
    damage, message = DAMAGES[kind]
    save(tmp_path, 3)
    newest = save(tmp_path, 6)
    damage(newest)
    with pytest.raises(CheckpointError) as refused:
        resume_from(tmp_path / "other", newest)
    assert str(newest) in str(refused.value) and message in str(refused.value)
    found = resume_from(tmp_path, "auto")
    assert found is not None and found.step == 3
    assert newest.exists(), "what is no intact checkpoint is left alone"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("weight", "told"), [(1e29, "1e+29"), (-torch.inf, "inf"), (torch.nan, "nan")])
def test_a_checkpoint_whose_model_cannot_generate_is_not_the_newest_good_one(
    tmp_path: Path, weight: float, told: str, dtype: torch.dtype
) -> None:
    source = tmp_path / "model"
    source.mkdir()

    def model(largest: float) -> HuggingFaceModel:
        tensors = {"norm": torch.ones(7, dtype=dtype), "head": torch.tensor([0.5, largest], dtype=dtype)}
        return HuggingFaceModel(tensors, source, dtype)

    save(tmp_path, 3, model=model(900.0))
    diverged = save(tmp_path, 6, model=model(weight))
    with pytest.raises(CheckpointError) as refused:
        resume_from(tmp_path / "other", diverged)
    assert f"{diverged} cannot be gone on from: a weight in head is {told}; its training had" in str(refused.value)
    found = resume_from(tmp_path, "auto")
    assert found is not None and found.step == 3 and diverged.exists()


def test_where_no_checkpoint_is_intact_nothing_begins_anew_by_itself(tmp_path: Path) -> None:
    for step in (3, 6):
        _flip(save(tmp_path, step))
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is intact: .*step-000006.*step-000003") as refused:
        resume_from(tmp_path, "auto")
    assert "checkpoint.resume = never" in str(refused.value)
    assert resume_from(tmp_path, "never", first_attempt=1) is None


@dataclasses.dataclass
class Model:
    """A trainer of some model."""

    specs: tuple[TensorSpec, ...]
    restored: SavedShards | None = None

    def tensor_specs(self) -> tuple[TensorSpec, ...]:
        return self.specs

    def restore(self, saved: SavedShards) -> None:
        self.restored = saved


@pytest.mark.parametrize(
    ("specs", "difference"),
    [
        ((TensorSpec("weight", "float32", (11,)),), "weight is float32 [10] there and float32 [11] in this job"),
        ((TensorSpec("weight", "bfloat16", (10,)),), "weight is float32 [10] there and bfloat16 [10] in this job"),
        ((TensorSpec("other", "float32", (10,)),), "other is absent there and float32 [10] in this job"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_the_first_tensor_that_differs(
    tmp_path: Path, specs: tuple[TensorSpec, ...], difference: str
) -> None:
    path, layout = save(tmp_path, 3), RankLayout(0, 1, 0, 1)
    same, other = Model((TensorSpec("weight", "float32", (10,)),)), Model(specs)
    restore(same, path, layout, "actor")
    assert same.restored is not None and same.restored.facts == [{"step": 3}]
    with pytest.raises(CheckpointError) as refused:
        restore(other, path, layout, "actor")
    assert f"{path} is a checkpoint of another model: {difference}" in str(refused.value)
    assert other.restored is None


def test_a_path_is_where_a_run_without_checkpoints_of_its_own_begins(tmp_path: Path) -> None:
    elsewhere = save(tmp_path / "elsewhere", 9)
    own = tmp_path / "own"
    begun = resume_from(own, elsewhere)
    assert begun is not None and begun.step == 9
    save(own, 12)
    restarted = resume_from(own, elsewhere)
    assert restarted is not None and restarted.step == 12
    with pytest.raises(CheckpointError, match="nowhere is no complete checkpoint: there is no such directory"):
        resume_from(tmp_path / "fresh", tmp_path / "nowhere")


def test_a_restarted_gang_that_was_to_begin_anew_goes_on_from_what_it_wrote_itself(tmp_path: Path) -> None:
    save(tmp_path, 6)  # of an earlier job: attempt 0
    assert resume_from(tmp_path, "never", first_attempt=1) is None
    save(tmp_path, 3, attempt=1)
    found = resume_from(tmp_path, "never", first_attempt=1)
    assert found is not None and found.step == 3
    _flip(found.path)
    assert resume_from(tmp_path, "never", first_attempt=1) is None


def test_old_checkpoints_are_removed_and_damaged_ones_are_not_counted(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step)
    (tmp_path / "step-000005/manifest.json").unlink()
    (tmp_path / "step-of-mine").mkdir()
    CheckpointStore(tmp_path).prune(keep_last=2, keep_every=2)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["step-000002", "step-000003", "step-000004", "step-000005", "step-of-mine"]


def test_a_copy_under_the_name_of_another_step_is_no_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 3)
    shutil.copytree(save(tmp_path, 6), tmp_path / "step-000009")
    store = CheckpointStore(tmp_path)
    found = store.newest()
    assert found is not None and found.path == tmp_path / "step-000006"
    store.prune(keep_last=1, keep_every=0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000006", "step-000009"]


def test_a_file_that_rank_0_cannot_see_is_no_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    staging = store.staging(3, 1)
    staging.mkdir(parents=True)
    files = write_snapshots({"actor": Snapshot(Shard({"a": torch.ones(1)}))}, staging, RankLayout(0, 1, 0, 1))
    (staging / SHARD).unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        store.publish(staging, files, step=3, attempt=0, layout=LAYOUT, roles={}, extra={}, config="")
    assert store.newest() is None


@pytest.mark.parametrize("name", ["", "../ledger", "a/b", ".hidden", "manifest\0"])
def test_files_of_others_have_plain_names(name: str) -> None:
    with pytest.raises(ValueError, match="no name for a file"):
        check_extra({name: b""})


def test_what_a_killed_process_left_half_done_is_ended(tmp_path: Path) -> None:
    save(tmp_path, 3)
    (tmp_path / "step-000003").rename(tmp_path / ".step-000003.replaced")  # killed between two renames
    shutil.copytree(tmp_path / ".step-000003.replaced", tmp_path / ".step-000006.2.partial")
    shutil.copytree(tmp_path / ".step-000003.replaced", tmp_path / ".step-000001.removed")
    found = resume_from(tmp_path, "auto")
    assert found is not None and found.step == 3
    assert [p.name for p in tmp_path.iterdir()] == ["step-000003"]


FILE_OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def save_and_die(root: Path, operation: int) -> None:
    """Replaces checkpoint 6, writes 9, keeps one; SIGKILLs itself before the file operation with that number."""
    left = operation

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if (event in FILE_OPERATIONS and str(root) in str(arguments[0])) or event == "os.rmdir":
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    CheckpointStore(root).tidy()
    save(root, 6, number=1)
    save(root, 9, number=2)
    CheckpointStore(root).prune(keep_last=1, keep_every=0)


def test_a_kill_between_any_two_file_operations_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    context, newest, operation = fork_server(), [], 0
    while True:
        root = tmp_path / str(operation)
        save(root, 3)
        save(root, 6)
        process = context.Process(target=save_and_die, args=(root, operation))
        process.start()
        process.join(30)
        found = resume_from(root, "auto")
        assert found is not None and found.extra == {"ledger.json": b"ledger of %d" % found.step}
        newest.append(found.step)
        assert all(path.name.startswith("step-") for path in root.iterdir()), "nothing half-done is left"
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        operation += 1
    assert operation > 40 and newest == sorted(newest) and set(newest) == {6, 9}


def write_forever(root: Path, first: int, announced: multiprocessing.connection.Connection) -> None:
    """Each step is saved twice, so that replacing is met too; keeps two."""
    for number in range(1_000_000):
        step = first + number // 2
        save(root, step, number=number, size=200_000)
        announced.send(step)
        CheckpointStore(root).prune(keep_last=2, keep_every=0)


def test_a_kill_at_any_moment_leaves_the_last_complete_checkpoint(tmp_path: Path) -> None:
    context, chance = fork_server(), random.Random(0)
    newest = kept = 0
    for _ in range(12):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=write_forever, args=(tmp_path, newest + 1, sender), daemon=True)
        process.start()
        sender.close()
        assert receiver.poll(60)
        time.sleep(chance.uniform(0, 0.06))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        try:
            while True:
                announced = receiver.recv()
        except EOFError:
            pass
        found = resume_from(tmp_path, "auto")
        assert found is not None and found.step >= announced
        left = [path.name for path in tmp_path.iterdir()]
        assert all(name.startswith("step-") for name in left), "nothing is left of what was half-done"
        assert len(left) <= max(kept, 2) + 1, "a kill before the first removal leaves one more"
        kept = len(left)
        assert read_checkpoint(found.path).extra == {"ledger.json": b"ledger of %d" % found.step}
        newest = found.step
