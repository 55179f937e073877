"""Copies of the published weights on disk: complete or absent, how many stay, whose files they take."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.config import Config
from asyncrl.tasks import Background
from asyncrl.weights import copies as copies_module
from asyncrl.weights.copies import Copies, weights_directory
from asyncrl.weights.copies import make_copies as configured_copies
from asyncrl.weights.copy_file import FILE
from asyncrl.weights.host_buffer import Recording
from tests.inference.conftest import eventually
from tests.weights.conftest import MakeCopies
from tests.weights.fakes import AccountingFleet, Nowhere, payload_of, random_tensors

pytestmark = pytest.mark.anyio

DISK_S = 60.0
SIZE_BYTES = sum(tensor.nbytes for tensor in random_tensors().values())


async def record(copies: Copies, tensors: Mapping[str, Tensor]) -> Recording:
    recording = copies.record(payload_of(tensors))
    assert recording is not None
    recording.reserve()
    await recording.payload.export(Nowhere(), 5.0)
    return recording


async def write(
    copies: Copies,
    version: str,
    seed: int = 0,
    in_use: Collection[Path] = (),
    tensors: Mapping[str, Tensor] | None = None,
) -> Path | None:
    """Publishes to nobody; the directory of the copy once it is written, None where it was given up."""
    fleet = AccountingFleet((), in_use=frozenset(in_use))
    directory = copies.place(version, in_use)
    recording = await record(copies, tensors or random_tensors(seed))
    copies.keep(recording, directory, fleet, anyio.current_time() + DISK_S)
    await eventually(lambda: directory in fleet.copies, DISK_S)
    return directory if fleet.copies[directory] else None


def holds(directory: Path | None, tensors: Mapping[str, Tensor]) -> bool:
    assert directory is not None
    loaded = load_file(directory / FILE)
    return loaded.keys() == tensors.keys() and all(
        torch.equal(loaded[name], tensor) and loaded[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


async def test_a_copy_is_read_back_bit_by_bit_by_the_library_that_engines_use(
    tmp_path: Path, make_copies: MakeCopies
) -> None:
    directory = await write(make_copies(tmp_path), "0.1")
    assert directory == tmp_path / "0.1" and holds(directory, random_tensors())
    with safe_open(directory / FILE, "pt") as file:
        assert file.metadata() == {"format": "pt"}


async def test_the_header_is_aligned_as_the_format_asks(tmp_path: Path, make_copies: MakeCopies) -> None:
    directory = await write(make_copies(tmp_path), "0.1")
    assert directory is not None
    raw = (directory / FILE).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    assert json.loads(raw[8 : 8 + length])["__metadata__"] == {"format": "pt"}


async def test_the_last_two_copies_are_kept_and_go_with_the_job(tmp_path: Path, make_copies: MakeCopies) -> None:
    copies = make_copies(tmp_path / "published")
    for version in ("0.1", "0.2", "0.3"):
        await write(copies, version)
    assert names(tmp_path / "published") == [".next", "0.2", "0.3"]
    for _ in range(2):
        await copies.aclose()
        assert copies._buffer.size_bytes == 0
        assert names(tmp_path) == []


async def test_the_files_of_an_old_copy_become_those_of_the_next(tmp_path: Path, make_copies: MakeCopies) -> None:
    copies = make_copies(tmp_path)
    directories = [await write(copies, version, seed) for seed, version in enumerate(("0.1", "0.2", "0.3"))]
    old = (tmp_path / ".next" / FILE).stat().st_ino
    directories.append(await write(copies, "0.4", seed=3))
    newest = directories[-1]
    assert newest is not None and (newest / FILE).stat().st_ino == old
    for seed, directory in enumerate(directories[2:], start=2):
        assert holds(directory, random_tensors(seed))


@pytest.mark.parametrize("older", [0, 100, 10_000_000])
async def test_a_copy_is_written_over_what_lies_there_and_is_as_long_as_its_tensors(
    tmp_path: Path, make_copies: MakeCopies, older: int
) -> None:
    """`older` bytes lie there already."""
    (tmp_path / ".next").mkdir()
    (tmp_path / ".next" / FILE).write_bytes(bytes(older))
    copies = make_copies(tmp_path)
    assert holds(await write(copies, "0.1"), random_tensors())
    few = {"norm": random_tensors()["layer.0.norm"]}
    await write(copies, "0.2")
    await write(copies, "0.3")
    directory = await write(copies, "0.4", tensors=few)
    assert holds(directory, few)
    assert directory is not None and (directory / FILE).stat().st_size < 1000


async def test_a_copy_that_somebody_removed_is_missed_by_nobody(tmp_path: Path, make_copies: MakeCopies) -> None:
    copies = make_copies(tmp_path)
    for version in ("0.1", "0.2", "0.3", "0.4"):
        assert await write(copies, version) is not None
        shutil.rmtree(tmp_path / "0.1", ignore_errors=True)
    assert names(tmp_path) == [".next", "0.3", "0.4"]


@pytest.mark.parametrize("needs_room", [True, False])
async def test_a_directory_that_somebody_removed_is_made_again(
    tmp_path: Path, make_copies: MakeCopies, needs_room: bool
) -> None:
    copies = make_copies(tmp_path / "published", needs_room=needs_room)
    await write(copies, "0.1")
    shutil.rmtree(tmp_path / "published")
    assert holds(await write(copies, "0.2", seed=1), random_tensors(1))


async def test_a_version_that_is_published_again_replaces_its_copy_and_no_other(
    tmp_path: Path, make_copies: MakeCopies
) -> None:
    copies = make_copies(tmp_path)
    for version in ("0.1", "0.2", "0.2", "0.2"):
        await write(copies, version)
    assert names(tmp_path) == ["0.1", "0.2"]


async def test_a_copy_in_use_stays_as_it_is_however_many_follow(tmp_path: Path, make_copies: MakeCopies) -> None:
    copies = make_copies(tmp_path)
    pinned = await write(copies, "0.1")
    assert pinned is not None
    with safe_open(pinned / FILE, "pt") as mapped:
        for seed, version in enumerate(("0.2", "0.3", "0.4", "0.5"), start=1):
            await write(copies, version, seed, in_use=[pinned])
        assert holds(pinned, random_tensors())
        assert torch.equal(mapped.get_tensor("big"), random_tensors()["big"])
    assert names(tmp_path) == [".next", "0.1", "0.5"]
    await write(copies, "0.6")
    assert names(tmp_path) == [".next", "0.5", "0.6"]


async def test_a_version_that_is_published_again_gets_a_new_copy_beside_the_one_in_use(
    tmp_path: Path, make_copies: MakeCopies
) -> None:
    copies = make_copies(tmp_path)
    published = await write(copies, "0.1")
    assert published is not None
    file = (published / FILE).stat().st_ino
    (published / FILE).write_bytes(b"damaged")
    again = await write(copies, "0.1", seed=1, in_use=[published])
    assert again is not None and again != published
    assert (published / FILE).stat().st_ino == file
    assert holds(again, random_tensors(1))
    assert await write(copies, "0.1", in_use=[published, again]) not in (published, again, None)
    assert await write(copies, "0.2") is not None


async def test_what_is_in_use_is_asked_once_more_when_the_copy_is_written(
    tmp_path: Path, make_copies: MakeCopies
) -> None:
    """A disk may take minutes; meanwhile an evaluation was pinned to an older copy."""
    copies, fleet = make_copies(tmp_path), AccountingFleet(())
    pinned = await write(copies, "0.1")
    await write(copies, "0.2")
    assert pinned is not None
    asked: list[frozenset[Path]] = []

    def copies_in_use() -> frozenset[Path]:
        asked.append(frozenset() if not asked else frozenset({pinned}))
        return asked[-1]

    fleet.copies_in_use = copies_in_use  # type: ignore[method-assign]
    copies.keep(await record(copies, random_tensors(2)), tmp_path / "0.3", fleet, anyio.current_time() + DISK_S)
    await eventually(lambda: bool(fleet.copies), DISK_S)
    assert holds(pinned, random_tensors()) and fleet.copies == {tmp_path / "0.3": True}


async def test_a_copy_that_cannot_be_written_is_a_warning(
    tmp_path: Path, make_copies: MakeCopies, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert await write(make_copies(tmp_path / "file" / "weights"), "0.1") is None
    assert "no copy of the published weights" in capsys.readouterr().out


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this machine has no /dev/full")
async def test_a_full_disk_in_the_middle_leaves_no_half_copy(
    tmp_path: Path, make_copies: MakeCopies, capsys: pytest.CaptureFixture[str]
) -> None:
    copies = make_copies(tmp_path)
    (tmp_path / ".next").mkdir()
    (tmp_path / ".next" / FILE).symlink_to("/dev/full")
    assert await write(copies, "0.1") is None
    assert "No space left" in capsys.readouterr().out
    assert names(tmp_path) == []
    assert holds(await write(copies, "0.2", seed=1), random_tensors(1))


async def test_a_copy_that_somebody_removed_before_it_had_its_name_is_a_warning(
    tmp_path: Path, make_copies: MakeCopies, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_file = copies_module.write_file

    def write_and_lose(recording: Recording, directory: Path) -> bool:
        written = write_file(recording, directory)
        shutil.rmtree(directory)
        return written

    monkeypatch.setattr(copies_module, "write_file", write_and_lose)
    assert await write(make_copies(tmp_path), "0.1") is None
    assert "no copy of the published weights" in capsys.readouterr().out


def free_disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=1 << 40, used=0, free=free))


async def test_a_copy_for_which_the_disk_has_no_room_is_not_begun(
    tmp_path: Path, make_copies: MakeCopies, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free_disk(monkeypatch, 2 * SIZE_BYTES)  # the header does not fit beside as much again
    assert await write(make_copies(tmp_path), "0.1") is None
    told = capsys.readouterr().out
    assert "set weights.directory to a larger disk" in told
    assert re.search(r"[1-9]\S* (bytes|kB|MB) are free, and [1-9]\S* (bytes|kB|MB) would have to be", told)
    assert names(tmp_path) == []
    assert await write(make_copies(tmp_path, needs_room=False), "0.1") is not None
    shutil.rmtree(tmp_path / "0.1")
    free_disk(monkeypatch, 2 * SIZE_BYTES + 10_000)
    assert await write(make_copies(tmp_path), "0.1") is not None


async def test_old_copies_make_room_for_new_ones_unless_they_are_in_use(
    tmp_path: Path, make_copies: MakeCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = make_copies(tmp_path)
    pinned, old = await write(copies, "0.1"), await write(copies, "0.2")
    free_disk(monkeypatch, 0)
    assert pinned is not None and old is not None
    assert await write(copies, "0.3", in_use=[pinned, old]) is None
    assert names(tmp_path) == ["0.1", "0.2"]
    assert holds(await write(copies, "0.4", seed=1, in_use=[pinned]), random_tensors(1))
    assert names(tmp_path) == ["0.1", "0.4"] and holds(pinned, random_tensors())


async def test_copies_of_a_killed_job_are_taken_over(tmp_path: Path, make_copies: MakeCopies) -> None:
    for version in ("0.1", "0.2", "0.3", "0.4"):
        await write(make_copies(tmp_path), version)
    assert await write(make_copies(tmp_path), "1.0") is not None
    assert len(names(tmp_path)) <= 3 and (tmp_path / "1.0").exists()


async def test_weights_of_any_size_are_kept_unless_told_otherwise(tmp_path: Path) -> None:
    async with anyio.create_task_group() as task_group:

        def copies_of(**weights: Any) -> Copies | None:
            return configured_copies(
                Config.model_validate({"run": {"dir": tmp_path}, "weights": weights}), Background(task_group)
            )

        assert copies_of(keep_published="never") is None
        for kept, needs_room in (({}, True), ({"keep_published": "auto"}, True), ({"keep_published": "always"}, False)):
            copies = copies_of(**kept)
            assert copies is not None and copies._needs_room is needs_room


def test_a_directory_of_the_users_choice_is_shared_by_runs_without_meeting(tmp_path: Path) -> None:
    def directory(run: str) -> Path:
        return weights_directory(
            Config.model_validate({"run": {"dir": tmp_path / run}, "weights": {"directory": tmp_path / "shm"}})
        )

    assert directory("a").parent == tmp_path / "shm"
    assert directory("a") == directory("a") != directory("b")
