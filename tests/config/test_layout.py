"""Who gets which GPU, and which wishes are refused before anything starts."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config import Config
from asyncrl.config.layout import EnginePlacement, Gpu
from asyncrl.config.machine import Machine, visible_gpus
from asyncrl.config.placement.gpus import by_node, shares
from asyncrl.config.placement.rules import derive_layout, place_another, plan_layout
from asyncrl.config.problems import InvalidConfigError
from asyncrl.config.reading.report import layout_lines
from asyncrl.errors import EngineError

UUIDS = ("GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3", "GPU-dddd-4")


def gpus(count: int, ranks: int = 1) -> Machine:
    return Machine(world_size=ranks, local_world_size=ranks, gpus=tuple(str(i) for i in range(count)))


def nodes(count: int, visible: int, ranks: int) -> Machine:
    """`count` nodes, each with `ranks` trainer ranks and `visible` GPUs."""
    return Machine(
        world_size=count * ranks, local_world_size=ranks, gpus=tuple(f"GPU-{index}" for index in range(visible))
    )


def places(engines: Sequence[EnginePlacement]) -> list[tuple[int, tuple[int, ...]]]:
    return [(engine.node, engine.gpus) for engine in engines]


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
        ("GPU-cccc-3,0", ("2", "0")),
        ("GPU-aaaa", ("0",)),
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
    assert layout.unused_gpus == (Gpu(0, 3),)


def test_masks_and_uuids_of_the_job_are_passed_on_to_engines():
    machine = Machine(gpus=("GPU-cccc-3", "7", "GPU-aaaa-1"))
    layout = plan_layout(Config.model_validate({"engine": {"tensor_parallel": 2}}), machine)
    assert layout.engines[0].gpus == (1, 2)
    assert layout.engines[0].visible_devices == "7,GPU-aaaa-1"


def test_an_explicit_list_is_taken_in_its_order():
    layout = plan_layout(Config.model_validate({"engine": {"gpus": [3, 1], "tensor_parallel": 1}}), gpus(4))
    assert [engine.gpus for engine in layout.engines] == [(3,), (1,)]
    assert layout.unused_gpus == (Gpu(0, 2),)


def test_a_single_gpu_is_shared_with_tensor_handover():
    layout = plan_layout(Config(), gpus(1))
    (engine,) = layout.engines
    assert (engine.gpus, engine.colocated, engine.transport) == ((0,), True, "tensor")
    assert layout.colocated


def test_gpus_are_shared_by_choice():
    layout = plan_layout(Config.model_validate({"engine": {"colocate": True}}), gpus(2, ranks=2))
    assert [(engine.gpus, engine.transport) for engine in layout.engines] == [((0,), "tensor"), ((1,), "tensor")]


def test_shared_and_free_gpus_are_mixed_only_where_weights_reach_all_engines_in_one_way():
    mixed = {"engine": {"colocate": True, "gpus": [0, 1]}}
    found = refusals(mixed, gpus(2))
    assert list(found) == ["weights.transport"]
    assert (
        "only broadcast reaches engine-1 and tensor reaches engine-0; name in engine.gpus only"
        in found["weights.transport"]
    )
    external = {"engine": {"external": ["http://127.0.0.1:1"], "num_engines": 1}}
    assert "broadcast reaches external-0" in refusals(external, gpus(1))["weights.transport"]
    layout = plan_layout(Config.model_validate(mixed | {"weights": {"transport": "disk"}}), gpus(2))
    assert [(e.colocated, e.transport) for e in layout.engines] == [(True, "disk"), (False, "disk")]


@pytest.mark.parametrize(
    ("engine", "ranks"),
    [
        ({}, [(0,), (1,), (2,), (3,)]),
        ({"tensor_parallel": 2}, [(0, 1), (2, 3)]),
        ({"tensor_parallel": 4}, [(0, 1, 2, 3)]),
        ({"tensor_parallel": 2, "num_engines": 1}, [(0, 1)]),
        ({"gpus": [3, 1], "tensor_parallel": 2}, [(3, 1)]),
        ({"gpus": [2, 0]}, [(2,), (0,)]),
    ],
)
@pytest.mark.parametrize("trainer", [1, 2, 4])
def test_engines_that_share_gpus_know_the_trainer_rank_on_each_in_their_own_order(trainer, engine, ranks):
    config = {"engine": {"colocate": True} | engine, "train": {"tensor_parallel": trainer}}
    layout = plan_layout(Config.model_validate(config), gpus(4, ranks=4))
    assert [placed.trainer_ranks for placed in layout.engines] == ranks
    assert [placed.gpus for placed in layout.engines] == ranks, "local rank i has GPU i"
    assert layout.transports == {"tensor"}


@pytest.mark.parametrize(("size", "text"), [(3, None), (8, "would take 8, but 4 of the 4 visible GPUs")])
def test_an_engine_that_is_larger_than_the_trainers_gpus_is_refused(size, text):
    config = {"engine": {"colocate": True, "tensor_parallel": size}}
    if text is None:  # GPU 3 trains alone
        assert places(plan_layout(Config.model_validate(config), gpus(4, ranks=4)).engines) == [(0, (0, 1, 2))]
    else:
        assert text in refusals(config, gpus(4, ranks=4))["engine.tensor_parallel"]


def test_ranks_of_a_second_node_use_their_own_nodes_gpus():
    layout = plan_layout(Config.model_validate({"engine": {"num_engines": 1}}), nodes(2, 3, 2))
    assert [(t.node, t.local_rank, t.gpu) for t in layout.trainers] == [(0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 1, 1)]
    (engine,) = layout.engines
    assert (engine.node, engine.gpus) == (0, (2,))
    assert layout.unused_gpus == (Gpu(1, 2),)


def test_engines_are_placed_on_free_gpus_node_by_node():
    config = {"engine": {"tensor_parallel": 2}, "models": {"judge": {}}}
    layout, problems = derive_layout(Config.model_validate(config), nodes(2, 6, 1), hosted=(0, 1))
    assert layout is not None and problems == []
    assert places(layout.engines) == [(0, (1, 2)), (0, (3, 4)), (1, (1, 2)), (1, (3, 4))]
    assert places(layout.beside["judge"].engines) == [(1, (5,))]
    assert layout.unused_gpus == (Gpu(0, 5),)
    assert [host.node for host in layout.hosts] == [0, 1]
    assert (layout.router.node, layout.beside["judge"].router.node, layout.rewards.node) == (0, 0, 0)


def test_gpus_of_all_nodes_are_shared_by_choice_and_named_ones_are_those_of_rank_0():
    config = {"engine": {"colocate": True, "tensor_parallel": 2}}
    layout, _ = derive_layout(Config.model_validate(config), nodes(2, 2, 2), hosted=(0, 1))
    assert layout is not None and all(engine.colocated for engine in layout.engines)
    assert places(layout.engines) == [(0, (0, 1)), (1, (0, 1))]
    named = plan_layout(Config.model_validate({"engine": {"gpus": [2, 1]}}), nodes(2, 3, 1))
    assert places(named.engines) == [(0, (2,)), (0, (1,))]


@pytest.mark.parametrize(
    ("config", "fix"),
    [
        ({}, "engine-1 would run on node 1, and a job can start processes only on node 0, that of rank 0; "),
        ({}, "set engine.num_engines = 1, or start engines there yourself and name them in engine.external"),
        ({"models": {"judge": {}}}, "judge-0 would run on node 1"),
        ({"models": {"judge": {}}}, "; name GPUs of node 0 in models.judge.gpus, or start"),
        ({"engine": {"num_engines": 2}}, "set engine.num_engines = 1"),
    ],
)
def test_an_engine_on_a_node_where_nothing_can_be_started_is_refused_with_one_message(config, fix):
    found = refusals(config, nodes(2, 2, 1))
    assert list(found) == ["torchrun --nnodes"]
    assert fix in found["torchrun --nnodes"]


def test_an_engine_is_added_only_where_the_job_can_start_it():
    config = Config.model_validate({"engine": {"num_engines": 1}})
    layout = plan_layout(config, nodes(2, 3, 1))
    assert place_another(config, layout, "engine-1", {Gpu(0, 1)}).devices == (Gpu(0, 2),)
    left = r"of its own: GPUs \[1, 2\] are left on node 1, where a job cannot start processes"
    with pytest.raises(EngineError, match=left):
        place_another(config, layout, "engine-2", {Gpu(0, 1), Gpu(0, 2)})


def test_what_an_engine_has_no_use_for_is_left_at_the_end_of_a_node_or_at_its_beginning():
    pool = {0: [1, 2, 3], 1: [4, 5]}
    assert shares(pool, 2) == [(Gpu(0, 1), Gpu(0, 2)), (Gpu(1, 4), Gpu(1, 5))]
    assert shares(pool, 2, from_end=True) == [(Gpu(0, 2), Gpu(0, 3)), (Gpu(1, 4), Gpu(1, 5))]
    assert shares(pool, 3) == [(Gpu(0, 1), Gpu(0, 2), Gpu(0, 3))]


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Config, Machine, tuple[int, ...]]:
    """A job of some nodes with some GPUs and ranks on each, and the nodes that have a host."""
    count, visible = draw(st.integers(1, 4)), draw(st.sampled_from([0, 1, 2, 4, 7, 8, 16]))
    ranks = draw(st.integers(1, max(1, visible // 2)) | st.just(max(1, visible)))
    size, engines = draw(st.integers(1, 3)), draw(st.none() | st.integers(1, 4))
    named = draw(st.permutations(range(visible)))[: size * (engines or 1)] if draw(st.integers(0, 4)) == 0 else None
    engine = {
        "tensor_parallel": size,
        "num_engines": engines,
        "colocate": draw(st.sampled_from([False, False, True])),
        "gpus": named or None,
    }
    beside = {"num_engines": draw(st.integers(1, 2)), "tensor_parallel": draw(st.integers(1, 2))}
    config = {
        "engine": engine,
        "models": dict.fromkeys(draw(st.sampled_from([[], [], ["judge"], ["judge", "reference"]])), beside),
        "debug": {"rollout_only": draw(st.integers(0, 4)) == 0},
    }
    hosted = draw(st.sampled_from([(0,), tuple(range(count)), tuple(range(count))]))
    return Config.model_validate(config), nodes(count, visible, ranks), hosted


@settings(max_examples=400)
@given(jobs())
def test_no_gpu_has_two_users_and_no_engine_two_nodes(job: tuple[Config, Machine, tuple[int, ...]]):
    config, machine, hosted = job
    layout, problems = derive_layout(config, machine, hosted)
    assert (layout is None) == bool(problems)
    if layout is None:
        return
    training = {Gpu(t.node, t.gpu) for t in layout.trainers if t.gpu is not None}
    assert len(training) == (len(layout.trainers) if machine.gpus else 0)
    beside = [engine for served in layout.beside.values() for engine in served.engines]
    engines = [*layout.engines, *beside]
    for engine in engines:
        assert len(engine.devices) == (engine.tensor_parallel if machine.gpus else 0)
        assert set(engine.devices) <= set(machine.all_gpus)
        assert engine.node in hosted
        shared = training.intersection(engine.devices)
        assert shared in (set(), set(engine.devices))  # all of its GPUs or none
        if not config.debug.rollout_only:
            assert engine.colocated == bool(shared)
            places_of = {t.rank: Gpu(t.node, t.gpu) for t in layout.trainers if t.gpu is not None}
            assert tuple(places_of[rank] for rank in engine.trainer_ranks) == (engine.devices if shared else ())
    assert not any(training.intersection(engine.devices) for engine in beside)
    used = [gpu for engine in engines for gpu in engine.devices]
    assert len(set(used)) == len(used)
    assert {*used, *training, *layout.unused_gpus} == set(machine.all_gpus)
    assert not ({*used, *training} & set(layout.unused_gpus))
    assert len(layout.transports) == 1
    wanted = config.engine.num_engines
    assert len(layout.engines) == wanted or (wanted is None and layout.engines)
    assert {name: len(served.engines) for name, served in layout.beside.items()} == {
        name: settings.num_engines for name, settings in config.models.items()
    }
    for placement in (layout.router, layout.rewards, *(served.router for served in layout.beside.values())):
        assert placement.node == 0
    assert {host.node for host in layout.hosts} == set(hosted)


@given(jobs())
def test_one_more_engine_takes_gpus_that_nobody_uses_until_none_are_left(job: tuple[Config, Machine, tuple[int, ...]]):
    config, machine, hosted = job
    layout, _ = derive_layout(config, machine, hosted)
    if layout is None or layout.device == "cpu":
        return
    taken = {gpu for engine in layout.engines for gpu in engine.devices}
    while True:
        try:
            added = place_another(config, layout, "engine-9", taken)
        except EngineError:
            break
        assert set(added.devices) <= set(layout.unused_gpus) - taken and added.node in hosted
        taken |= set(added.devices)
    left = [gpu for gpu in layout.unused_gpus if gpu not in taken and gpu.node in hosted]
    fits = any(len(indices) >= config.engine.tensor_parallel for indices in by_node(left).values())
    assert layout.colocated or not fits


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
        ({"engine": {"gpus": []}}, gpus(2), "engine.tensor_parallel", "would take 1, but 0"),
        ({"engine": {"gpus": [1, 2, 3], "tensor_parallel": 2}}, gpus(4), "engine.gpus", "list exactly those"),
        ({"engine": {"gpus": [1, 2], "num_engines": 1}}, gpus(3), "engine.gpus", "list exactly those"),
        ({"engine": {"num_engines": 3}}, gpus(3), "engine.num_engines", "3 engines of 1 GPU would take 3, but 2"),
        ({"engine": {"tensor_parallel": 4}}, gpus(4), "engine.tensor_parallel", "would take 4, but 3"),
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
        (
            {"train": {"optimizer_on_host": True}, "model": {"dtype": "float32"}},
            gpus(2),
            "train.optimizer_on_host",
            "leave model.dtype at auto",
        ),
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


def test_a_dry_run_of_several_nodes_names_the_node_of_each_process() -> None:
    config = Config.model_validate({"engine": {"num_engines": 1}})
    machine = nodes(2, 2, 1)
    assert layout_lines(config, plan_layout(config, machine), machine) == [
        "process layout on 4 GPUs of 2 nodes, bfloat16: 2 trainer ranks, 2 data x 1 tensor parallel; 1 engine",
        "  rank 0       node 0 GPU 0     driver and trainer, model copy 0 part 0",
        "  rank 1       node 1 GPU 0     trainer, model copy 1 part 0",
        "  host         node 0 CPU       owns engines, router and reward workers",
        "  router       node 0 CPU       sglang-router, round_robin, 127.0.0.1, a free port",
        "  engine-0     node 0 GPU 1     tensor parallel 1, weights by broadcast",
        "  rewards      node 0 CPU       1 worker",
        "  unused: node 1 GPU 1",
    ]
