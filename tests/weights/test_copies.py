"""Copies of the published weights: complete or absent, and never the reason for a failed publication."""

from __future__ import annotations

import gc
import json
import shutil
import threading
import time
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from asyncrl.config import Config
from asyncrl.errors import WeightUpdateError
from asyncrl.weights.buckets import TensorSpec
from asyncrl.weights.copies import AHEAD_BYTES, Copies, CopyingSource, make_copies, weights_directory
from asyncrl.weights.copy_writer import CopyWriter
from tests.inference.conftest import eventually
from tests.weights.fakes import random_tensors, specs_of


def write(copies: Copies, version: str, seed: int = 0, in_use: Collection[Path] = ()) -> Path | None:
    tensors = random_tensors(seed)
    writer = copies.writer(specs_of(tensors))
    assert writer is not None
    writer.start()
    for name, tensor in tensors.items():
        writer.put(name, tensor)
    writer.finish()
    return copies.publish(writer, version, in_use)


def test_a_copy_is_read_back_bit_by_bit_by_the_library_that_engines_use(tmp_path: Path) -> None:
    directory = write(Copies(tmp_path), "0.1")
    assert directory is not None and directory.name == "0.1"
    loaded, expected = load_file(directory / "model.safetensors"), random_tensors()
    assert loaded.keys() == expected.keys()
    assert all(
        torch.equal(loaded[name], tensor) and loaded[name].dtype == tensor.dtype for name, tensor in expected.items()
    )
    with safe_open(directory / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_the_last_two_copies_are_kept(tmp_path: Path) -> None:
    copies = Copies(tmp_path)
    for version in ("0.1", "0.2", "0.3"):
        write(copies, version)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".next", "0.2", "0.3"]
    copies.remove()
    assert not tmp_path.exists()


def test_the_files_of_an_old_copy_become_those_of_the_next(tmp_path: Path) -> None:
    copies = Copies(tmp_path)
    directories = [write(copies, version, seed) for seed, version in enumerate(("0.1", "0.2", "0.3"))]
    old = (tmp_path / ".next" / "model.safetensors").stat().st_ino
    directories.append(write(copies, "0.4", seed=3))
    newest = directories[-1]
    assert newest is not None and (newest / "model.safetensors").stat().st_ino == old
    for seed, directory in enumerate(directories[2:], start=2):
        assert directory is not None
        loaded, expected = load_file(directory / "model.safetensors"), random_tensors(seed)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("older", [0, 100, 10_000_000])
def test_a_reserved_file_has_its_whole_size_before_the_first_tensor(tmp_path: Path, older: int) -> None:
    """`older` bytes lie there already."""
    copies, tensors = Copies(tmp_path), random_tensors()
    path = tmp_path / ".next" / "model.safetensors"
    path.parent.mkdir()
    path.write_bytes(bytes(older))
    writer = copies.writer(specs_of(tensors))
    assert writer is not None
    writer.reserve()
    reserved = path.stat().st_size
    directory = write(copies, "0.1")
    assert directory is not None
    assert reserved == max(older, (directory / "model.safetensors").stat().st_size)
    assert load_file(directory / "model.safetensors").keys() == tensors.keys()


def test_a_copy_may_be_shorter_than_the_one_in_whose_files_it_is_written(tmp_path: Path) -> None:
    copies = Copies(tmp_path)
    for version in ("0.1", "0.2", "0.3"):
        write(copies, version)
    few = {"norm": random_tensors()["layer.0.norm"]}
    writer = copies.writer(specs_of(few))
    assert writer is not None
    writer.start()
    writer.put("norm", few["norm"])
    writer.finish()
    directory = copies.publish(writer, "0.4")
    assert directory is not None
    assert torch.equal(load_file(directory / "model.safetensors")["norm"], few["norm"])


def test_a_writer_that_was_given_up_does_not_reach_into_the_next_copy(tmp_path: Path) -> None:
    copies, others = Copies(tmp_path), random_tensors(seed=1)
    given_up = copies.writer(specs_of(others))
    assert given_up is not None
    given_up.start()
    given_up.put("layer.0.weight", others["layer.0.weight"])
    directory = write(copies, "0.1")
    del given_up
    gc.collect()
    assert directory is not None
    loaded, expected = load_file(directory / "model.safetensors"), random_tensors()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_a_copy_that_somebody_removed_is_missed_by_nobody(tmp_path: Path) -> None:
    copies = Copies(tmp_path)
    for version in ("0.1", "0.2", "0.3", "0.4"):
        assert write(copies, version) is not None
        shutil.rmtree(tmp_path / "0.1", ignore_errors=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".next", "0.3", "0.4"]


def test_a_version_that_is_published_again_replaces_its_copy_and_no_other(tmp_path: Path) -> None:
    copies = Copies(tmp_path)
    for version in ("0.1", "0.2", "0.2", "0.2"):
        write(copies, version)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.1", "0.2"]


def test_a_copy_in_use_stays_as_it_is_however_many_follow(tmp_path: Path) -> None:
    copies = Copies(tmp_path)
    pinned = write(copies, "0.1")
    assert pinned is not None
    with safe_open(pinned / "model.safetensors", "pt") as mapped:
        for seed, version in enumerate(("0.2", "0.3", "0.4", "0.5"), start=1):
            write(copies, version, seed, in_use=[pinned])
        held, expected = load_file(pinned / "model.safetensors"), random_tensors()
        assert all(torch.equal(held[name], tensor) for name, tensor in expected.items())
        assert torch.equal(mapped.get_tensor("big"), expected["big"])
    assert sorted(path.name for path in tmp_path.iterdir()) == [".next", "0.1", "0.5"]
    write(copies, "0.6")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".next", "0.5", "0.6"]


def test_a_version_that_is_published_again_gets_a_new_copy_beside_the_one_in_use(tmp_path: Path) -> None:
    copies = Copies(tmp_path)
    published = write(copies, "0.1")
    assert published is not None
    file = (published / "model.safetensors").stat().st_ino
    (published / "model.safetensors").write_bytes(b"damaged")
    again = write(copies, "0.1", seed=1, in_use=[published])
    assert again is not None and again != published
    assert (published / "model.safetensors").stat().st_ino == file
    assert torch.equal(load_file(again / "model.safetensors")["big"], random_tensors(1)["big"])
    assert write(copies, "0.1", in_use=[published, again]) not in (published, again, None)
    assert write(copies, "0.2") is not None


@pytest.mark.anyio
async def test_a_disk_that_does_not_answer_costs_copies_until_it_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copies, specs = Copies(tmp_path), specs_of(random_tensors())
    writer, answers = copies.writer(specs), threading.Event()
    assert writer is not None
    with anyio.fail_after(5):
        assert await copies.at_disk("room for a copy", answers.wait, 0.05) is None
    assert "no room for a copy from the disk of" in capsys.readouterr().out
    assert copies.writer(specs) is None, "the thread may still write into the files"
    answers.set()
    await eventually(lambda: copies.writer(specs) is not None)
    with anyio.fail_after(5):
        assert await copies.at_disk("room for a copy", lambda: copies.prepare(writer), 5.0) is writer


def test_a_copy_that_was_broken_off_does_not_appear(tmp_path: Path) -> None:
    copies, tensors = Copies(tmp_path), random_tensors()
    writer = copies.writer(specs_of(tensors))
    assert writer is not None
    writer.start()
    writer.put("layer.0.weight", tensors["layer.0.weight"])
    assert copies.publish(writer, "0.1") is None
    writer.start()  # the transfer is repeated
    for name, tensor in tensors.items():
        writer.put(name, tensor)
    writer.finish()
    assert copies.publish(writer, "0.1") is not None


def test_a_copy_that_cannot_be_written_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    writer = Copies(tmp_path / "file" / "weights").writer(specs_of(random_tensors()))
    assert writer is not None
    writer.reserve()
    assert capsys.readouterr().out == ""
    assert write(Copies(tmp_path / "file" / "weights"), "0.1") is None
    assert "no copy of the published weights" in capsys.readouterr().out


def test_a_full_disk_in_the_middle_leaves_no_half_copy(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this machine has no /dev/full")
    tensors = random_tensors()
    writer = CopyWriter(tmp_path / "part", specs_of(tensors))
    writer.start()
    while not writer.idle:
        time.sleep(0.001)
    assert writer._file is not None
    writer._file.close()
    writer._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 - the writer closes it
    for name, tensor in tensors.items():
        writer.put(name, tensor)
    writer.finish()
    assert not writer.complete
    assert not (tmp_path / "part").exists()


def test_weights_of_any_size_are_kept_unless_told_otherwise(tmp_path: Path) -> None:
    def copies_of(keep: str) -> Copies | None:
        return make_copies(Config.model_validate({"run": {"dir": tmp_path}, "weights": {"keep_published": keep}}))

    assert copies_of("never") is None
    for keep, needs_room in (("auto", True), ("always", False)):
        copies = copies_of(keep)
        assert copies is not None and copies._needs_room is needs_room
        for elements, ahead in ((AHEAD_BYTES // 4, False), (1 + AHEAD_BYTES // 4, True)):
            writer = copies.writer([TensorSpec("w", "float32", (elements,))])
            assert writer is not None and writer.ahead is ahead


def free_disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=1 << 40, used=0, free=free))


def prepared(copies: Copies, in_use: Collection[Path] = ()) -> bool:
    writer = copies.writer(specs_of(random_tensors()))
    assert writer is not None
    return copies.prepare(writer, in_use) is writer


def test_a_copy_for_which_the_disk_has_no_room_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    size = sum(spec.size_bytes for spec in specs_of(random_tensors()))
    free_disk(monkeypatch, 2 * size)  # the header does not fit beside as much again
    assert not prepared(Copies(tmp_path))
    assert "set weights.directory to a larger disk" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert prepared(Copies(tmp_path, needs_room=False))
    free_disk(monkeypatch, 2 * size + 10_000)
    assert prepared(Copies(tmp_path))


def test_old_copies_make_room_for_new_ones_unless_they_are_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = Copies(tmp_path)
    pinned, old = write(copies, "0.1"), write(copies, "0.2")
    free_disk(monkeypatch, 0)
    assert pinned is not None and old is not None
    assert not prepared(copies, [pinned, old])
    assert prepared(copies, [pinned])
    assert sorted(path.name for path in tmp_path.iterdir()) == [".next", "0.1"]


def test_copies_of_a_killed_job_are_taken_over(tmp_path: Path) -> None:
    for version in ("0.1", "0.2", "0.3", "0.4"):
        write(Copies(tmp_path), version)
    copies = Copies(tmp_path)
    assert prepared(copies)
    write(copies, "1.0")
    assert len(list(tmp_path.iterdir())) <= 3 and (tmp_path / "1.0").exists()


def test_a_directory_of_the_users_choice_is_shared_by_runs_without_meeting(tmp_path: Path) -> None:
    def directory(run: str) -> Path:
        return weights_directory(
            Config.model_validate({"run": {"dir": tmp_path / run}, "weights": {"directory": tmp_path / "shm"}})
        )

    assert directory("a").parent == tmp_path / "shm"
    assert directory("a") == directory("a") != directory("b")


@pytest.mark.anyio
async def test_a_sink_that_fails_fails_the_export_and_leaves_no_copy(tmp_path: Path) -> None:
    from tests.weights.fakes import ThreadSource

    class Failing:
        def put(self, name: str, tensor: torch.Tensor) -> None:
            raise WeightUpdateError("the wire broke")

        def finish(self) -> None: ...

    source = ThreadSource()
    copies = Copies(tmp_path)
    writer = copies.writer(source.tensor_specs)
    assert writer is not None
    try:
        with pytest.raises(WeightUpdateError, match="the wire broke"), anyio.fail_after(10):
            await CopyingSource(source, writer).export(Failing(), 5.0)
        assert copies.publish(writer, "0.1") is None
    finally:
        source.close()


def test_the_header_is_aligned_as_the_format_asks(tmp_path: Path) -> None:
    directory = write(Copies(tmp_path), "0.1")
    assert directory is not None
    raw = (directory / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    assert json.loads(raw[8 : 8 + length])["__metadata__"] == {"format": "pt"}


def test_a_copy_that_somebody_removed_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copies, tensors = Copies(tmp_path), random_tensors()
    writer = copies.writer(specs_of(tensors))
    assert writer is not None
    writer.start()
    for name, tensor in tensors.items():
        writer.put(name, tensor)
    writer.finish()
    shutil.rmtree(writer.directory)
    assert copies.publish(writer, "0.1") is None
    assert "no copy of the published weights" in capsys.readouterr().out
