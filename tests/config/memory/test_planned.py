"""`--as`: machines that are not here."""

from __future__ import annotations

import pytest

from asyncrl.config import Config
from asyncrl.config.machine import InstalledGpu, Machine, memory_of
from asyncrl.config.memory.planned import KNOWN_GPUS, planned_machine
from asyncrl.config.problems import InvalidConfigError
from tests.config.conftest import Refused

GB = 10**9


@pytest.mark.parametrize(
    ("written", "nodes", "gpus", "size"),
    [
        ("8x80GB", 1, 8, 80 * GB),
        ("8xH100", 1, 8, KNOWN_GPUS["H100"]),
        ("8xh100", 1, 8, KNOWN_GPUS["H100"]),
        ("2x8x80GB", 2, 8, 80 * GB),
        ("80gib", 1, 1, 80 << 30),
        ("4x79.5GB", 1, 4, int(79.5 * GB)),
        ("2xA100-40GB", 1, 2, 40960 << 20),
    ],
)
def test_a_machine_is_written_as_people_say_it(written: str, nodes: int, gpus: int, size: int) -> None:
    machine = planned_machine(written, 2, Machine(rank=0, open_files=10), Config())
    assert (machine.nodes, len(machine.gpus), machine.gpu_bytes) == (nodes, gpus, size)
    assert (machine.world_size, machine.local_world_size, machine.open_files) == (2 * nodes, 2, None)


@pytest.mark.parametrize(
    "written", ["", "8", "8x", "8x80", "8x80TB", "0x80GB", "x80GB", "9999xH100", "8xH1OO", "2x3x4xH100"]
)
def test_a_machine_that_cannot_be_read_is_refused_with_an_example(written: str) -> None:
    with pytest.raises(InvalidConfigError, match="8x80GB"):
        planned_machine(written, None, Machine(), Config())


@pytest.mark.parametrize(
    ("settings", "here", "expected"),
    [
        ({}, Machine(), 4),
        ({}, Machine(world_size=6, local_world_size=6), 6),
        ({"engine": {"colocate": True}}, Machine(), 8),
        ({"engine": {"num_engines": 2, "tensor_parallel": 2}}, Machine(), 4),
        ({"engine": {"gpus": [6, 7]}}, Machine(), 6),
        ({"engine": {"gpus": [6, 7]}, "train": {"tensor_parallel": 4}}, Machine(), 4),
        ({"debug": {"train_only": True}}, Machine(), 8),
    ],
)
def test_ranks_are_those_of_torchrun_or_what_engines_leave(
    settings: dict[str, object], here: Machine, expected: int
) -> None:
    assert planned_machine("8x80GB", None, here, Config.model_validate(settings)).local_world_size == expected


@pytest.mark.parametrize(
    ("argv", "key", "text"),
    [
        (["--as", "8x80GB"], "--as", "give --dry-run too"),
        (["--dry-run", "--as"], "--as", "needs a machine"),
        (["--dry-run", "--nproc-per-node", "4"], "--nproc-per-node", "an option of torchrun"),
        (["--dry-run", "--as", "8x80GB", "--nproc-per-node", "many"], "--nproc-per-node", "number of trainer ranks"),
    ],
)
def test_the_options_of_a_plan_go_together(refused: Refused, argv: list[str], key: str, text: str) -> None:
    assert text in refused(*argv)[key]


def test_the_smallest_visible_gpu_counts_and_a_slice_is_not_known() -> None:
    installed = [InstalledGpu("GPU-aa-1", 80 * GB), InstalledGpu("GPU-bb-2", 40 * GB), InstalledGpu("GPU-cc-3", 0)]
    assert memory_of(("0",), installed) == 80 * GB
    assert memory_of(("0", "1"), installed) == 40 * GB
    assert memory_of(("2",), installed) is None
    assert memory_of(("MIG-1",), installed) is None
    assert memory_of((), installed) is None
