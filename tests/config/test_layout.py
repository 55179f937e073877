"""Who gets which GPU, and which wishes are refused before anything starts."""

from __future__ import annotations

import re

import pytest

from asyncrl.config import Config
from asyncrl.config.layout import plan_layout
from asyncrl.config.machine import Machine, visible_gpus
from asyncrl.config.problems import InvalidConfigError
from asyncrl.config.reading.report import layout_lines

UUIDS = ("GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3", "GPU-dddd-4")


def gpus(count: int, ranks: int = 1) -> Machine:
    return Machine(world_size=ranks, local_world_size=ranks, gpus=tuple(str(i) for i in range(count)))


def refusals(config: dict[str, object], machine: Machine) -> dict[str, str]:
    with pytest.raises(InvalidConfigError) as caught:
        plan_layout(Config.model_validate(config), machine)
    return {problem.key: problem.text for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (None, ("0", "1", "2", "3")),
        ("2,0", ("2", "0")),
        ("1, 3", ("1", "3")),
        ("", ()),
        ("-1", ()),
        ("0,-1,1", ("0",)),
        ("0,9,1", ("0",)),
        ("GPU-cccc-3,0", ("GPU-cccc-3", "0")),
        ("GPU-aaaa", ("GPU-aaaa",)),
        ("GPU-aa", ()),
        ("GPU-zz,0", ()),
        ("0,0", ()),
        ("0,GPU-aaaa-1", ()),
        ("MIG-1,MIG-2", ("MIG-1",)),
        ("nonsense", ()),
    ],
)
def test_a_mask_shows_what_cuda_would_show(mask, expected):
    assert visible_gpus(mask, UUIDS) == expected


def test_a_mask_shows_nothing_without_a_driver():
    assert visible_gpus("0,1", ()) == ()
    assert visible_gpus("MIG-1", ()) == ()


def test_a_machine_is_read_from_the_environment_of_torchrun():
    environ = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "RANK": "5", "CUDA_VISIBLE_DEVICES": ""}
    machine = Machine.detect(environ)
    assert (machine.world_size, machine.local_world_size, machine.rank, machine.gpus) == (8, 4, 5, ())
    assert machine.cpus
    alone = Machine.detect({"CUDA_VISIBLE_DEVICES": ""})
    assert (alone.world_size, alone.local_world_size, alone.rank) == (1, 1, 0)


def test_without_a_gpu_everything_runs_on_cpu_in_float32_with_one_engine():
    layout = plan_layout(Config(), Machine(world_size=2, local_world_size=2))
    assert (layout.device, layout.dtype, layout.colocated, layout.unused_gpus) == ("cpu", "float32", False, ())
    assert [(trainer.rank, trainer.gpu) for trainer in layout.trainers] == [(0, None), (1, None)]
    (engine,) = layout.engines
    assert (engine.engine_id, engine.gpus, engine.visible_devices) == ("engine-0", (), "")
    assert engine.transport == "broadcast"


def test_engines_take_the_gpus_that_no_trainer_rank_uses():
    layout = plan_layout(Config(), gpus(4, ranks=2))
    assert (layout.device, layout.dtype) == ("cuda", "bfloat16")
    assert [trainer.gpu for trainer in layout.trainers] == [0, 1]
    assert [(engine.gpus, engine.colocated, engine.transport) for engine in layout.engines] == [
        ((2,), False, "broadcast"),
        ((3,), False, "broadcast"),
    ]


def test_a_larger_engine_takes_several_gpus_and_the_rest_is_unused():
    layout = plan_layout(Config.model_validate({"engine": {"tensor_parallel": 2}}), gpus(4))
    assert [engine.gpus for engine in layout.engines] == [(1, 2)]
    assert layout.unused_gpus == (3,)


def test_masks_and_uuids_of_the_job_are_passed_on_to_engines():
    machine = Machine(gpus=("GPU-cccc-3", "7", "GPU-aaaa-1"))
    layout = plan_layout(Config.model_validate({"engine": {"tensor_parallel": 2}}), machine)
    assert layout.engines[0].gpus == (1, 2)
    assert layout.engines[0].visible_devices == "7,GPU-aaaa-1"


def test_an_explicit_list_is_taken_in_its_order():
    layout = plan_layout(Config.model_validate({"engine": {"gpus": [3, 1], "tensor_parallel": 1}}), gpus(4))
    assert [engine.gpus for engine in layout.engines] == [(3,), (1,)]
    assert layout.unused_gpus == (2,)


def test_a_single_gpu_is_shared_with_tensor_handover():
    layout = plan_layout(Config(), gpus(1))
    (engine,) = layout.engines
    assert (engine.gpus, engine.colocated, engine.transport) == ((0,), True, "tensor")
    assert layout.colocated


def test_gpus_are_shared_by_choice():
    layout = plan_layout(Config.model_validate({"engine": {"colocate": True}}), gpus(2, ranks=2))
    assert [(engine.gpus, engine.transport) for engine in layout.engines] == [((0,), "tensor"), ((1,), "tensor")]


def test_shared_and_free_gpus_can_be_mixed_by_an_explicit_list():
    layout = plan_layout(Config.model_validate({"engine": {"colocate": True, "gpus": [0, 1]}}), gpus(2))
    assert [(engine.colocated, engine.transport) for engine in layout.engines] == [
        (True, "tensor"),
        (False, "broadcast"),
    ]


def test_ranks_of_a_second_node_use_their_own_nodes_gpus():
    layout = plan_layout(Config(), Machine(world_size=4, local_world_size=2, gpus=("0", "1", "2")))
    assert [(t.node, t.local_rank, t.gpu) for t in layout.trainers] == [(0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 1, 1)]
    assert layout.engines[0].gpus == (2,)


@pytest.mark.parametrize(
    ("config", "machine", "key", "text"),
    [
        ({"train": {"tensor_parallel": 2}}, gpus(0, ranks=3), "train.tensor_parallel", "does not divide the 3"),
        ({"train": {"tensor_parallel": 4}}, gpus(0, ranks=2), "train.tensor_parallel", "--nproc-per-node 4"),
        ({}, gpus(2, ranks=4), "torchrun --nproc-per-node", "start at most 2"),
        ({}, gpus(2, ranks=2), "engine.gpus", "none is left for engines"),
        ({"engine": {"gpus": [0, 1]}}, gpus(2), "engine.gpus", "[0] are also used by trainer ranks"),
        ({"engine": {"gpus": [5, -1]}}, gpus(2), "engine.gpus", "[-1, 5] named, but the visible GPUs are 0 to 1"),
        ({"engine": {"gpus": [1, 1]}}, gpus(2), "engine.gpus", "names a GPU twice"),
        ({"engine": {"gpus": []}}, gpus(2), "engine.tensor_parallel", "need 1, but 0"),
        ({"engine": {"gpus": [1, 2, 3], "tensor_parallel": 2}}, gpus(4), "engine.gpus", "list exactly those"),
        ({"engine": {"gpus": [1, 2], "num_engines": 1}}, gpus(3), "engine.gpus", "list exactly those"),
        ({"engine": {"num_engines": 3}}, gpus(3), "engine.num_engines", "3 engine(s) of 1 GPU(s) need 3, but 2"),
        ({"engine": {"tensor_parallel": 4}}, gpus(4), "engine.tensor_parallel", "need 4, but 3"),
        (
            {"engine": {"gpus": [0, 1], "tensor_parallel": 2, "colocate": True}},
            gpus(2),
            "engine.gpus",
            "all of its GPUs with the trainer or none",
        ),
        ({"engine": {"gpus": [0]}}, gpus(0), "engine.gpus", "sees no GPU"),
        ({"engine": {"device": "cuda"}}, gpus(0), "engine.device", "sees no GPU"),
        ({"engine": {"device": "cpu"}}, gpus(2), "engine.device", 'CUDA_VISIBLE_DEVICES=""'),
        ({"weights": {"transport": "tensor"}}, gpus(2), "weights.transport", "engine-0 shares no GPU"),
        ({"weights": {"transport": "broadcast"}}, gpus(1), "weights.transport", "NCCL refuses"),
        ({"weights": {"on_update": "in_place"}}, gpus(1), "weights.on_update", "engine-0 gives up all KV"),
    ],
)
def test_a_layout_that_cannot_work_is_refused_with_the_fix(config, machine, key, text):
    found = refusals(config, machine)
    assert list(found) == [key]
    assert text in found[key]


def test_half_a_job_shares_no_gpu_with_the_half_that_is_missing():
    served = {"engine": {"external": ["http://127.0.0.1:1"], "num_engines": 1}, "models": {"judge": {"path": "judge"}}}
    for machine in (gpus(1), gpus(2, ranks=2)):
        layout = plan_layout(Config.model_validate(served | {"debug": {"train_only": True}}), machine)
        assert (layout.engines, layout.external, layout.beside, layout.colocated) == ((), (), {}, False)
    alone = plan_layout(Config.model_validate({"debug": {"rollout_only": True}}), gpus(1))
    assert [engine.gpus for engine in alone.engines] == [(0,)] and not alone.colocated


@pytest.mark.parametrize(
    ("debug", "expected"),
    [
        ({}, ["rank 0: driver and trainer", "host", "router", "engine-0", "rewards"]),
        ({"train_only": True}, ["rank 0: driver and trainer", "host"]),
        ({"rollout_only": True}, ["rank 0: driver", "host", "router", "engine-0", "rewards"]),
    ],
)
def test_a_dry_run_of_half_a_job_shows_that_half(debug: dict[str, bool], expected: list[str]) -> None:
    config, machine = Config.model_validate({"debug": debug}), gpus(0)
    told = [re.split(r"  +", line.strip()) for line in layout_lines(config, plan_layout(config, machine), machine)[1:]]
    names = [f"{name}: {role.split(',')[0]}" if name == "rank 0" else name for name, _, role in told]
    assert names == expected
