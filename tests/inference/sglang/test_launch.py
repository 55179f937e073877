from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.layout import Device, EnginePlacement
from asyncrl.config.sections.inference import EngineConfig, RouterConfig
from asyncrl.inference.engines.ports import EnginePorts
from asyncrl.inference.routing.router_main import parse
from asyncrl.inference.sglang.launch import bind_threads, engine_argv, engine_environment, router_argv

SCRATCH = Path("/tmp/asyncrl-x")
PORTS = EnginePorts.from_base(21000)


def placement(tensor_parallel: int = 1, gpus: tuple[int, ...] = (), colocated: bool = False) -> EnginePlacement:
    return EnginePlacement(
        engine_id="engine-0",
        node=0,
        tensor_parallel=tensor_parallel,
        gpus=gpus,
        visible_devices=",".join(map(str, gpus)),
        trainer_ranks=gpus if colocated else (),
        transport="broadcast",
    )


def flags(config: EngineConfig, device: Device = "cpu", place: EnginePlacement | None = None) -> dict[str, str | bool]:
    argv = engine_argv(
        config,
        place or placement(),
        PORTS,
        model_path=Path("/models/m"),
        host="127.0.0.1",
        device=device,
        dtype="float32",
        context_length=None,
    )
    found: dict[str, str | bool] = {}
    for i, word in enumerate(argv):
        if word.startswith("--"):
            value = argv[i + 1] if i + 1 < len(argv) and not argv[i + 1].startswith("--") else True
            found[word[2:]] = value
    return found


def test_a_cpu_engine_never_leaves_its_dtype_pool_or_idle_loop_to_sglang() -> None:
    found = flags(EngineConfig())
    assert found["device"] == "cpu"
    assert found["dtype"] == "float32"
    assert found["max-total-tokens"] == "65536"
    assert found["max-running-requests"] == "128"
    assert found["sleep-on-idle"] is True
    assert found["grammar-backend"] == "none"
    assert found["skip-server-warmup"] is True
    assert "context-length" not in found


def test_a_gpu_engine_sizes_its_own_pool() -> None:
    found = flags(EngineConfig(), "cuda", placement(gpus=(1,)))
    assert "max-total-tokens" not in found
    assert "enable-memory-saver" not in found


def test_an_idle_engine_sleeps_unless_its_ranks_wait_for_each_other_at_every_step() -> None:
    for device, gpus in (("cpu", ()), ("cuda", (1,))):
        assert flags(EngineConfig(), device, placement(gpus=gpus))["sleep-on-idle"] is True
        apart = EngineConfig(server_args={"enable_dp_attention": True})
        assert "sleep-on-idle" not in flags(apart, device, placement(gpus=gpus))


def test_a_colocated_engine_can_give_memory_back_and_leaves_room_for_the_trainer() -> None:
    found = flags(EngineConfig(), "cuda", placement(gpus=(0,), colocated=True))
    assert found["enable-memory-saver"] is True
    assert 0 < float(str(found["mem-fraction-static"])) < 0.8


@pytest.mark.parametrize("colocated", [True, False])
def test_an_engine_that_gives_memory_back_gives_that_of_its_graphs_too(colocated: bool) -> None:
    shared = placement(gpus=(0,), colocated=colocated)
    environment = engine_environment(EngineConfig(), shared, {}, threads=None, cores=(0,), scratch=None)
    assert environment.get("SGLANG_MEMORY_SAVER_CUDA_GRAPH") == ("true" if colocated else None)


def test_ports_are_those_that_were_reserved() -> None:
    found = flags(EngineConfig())
    assert (found["port"], found["nccl-port"], found["engine-info-bootstrap-port"]) == ("21000", "21001", "21002")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"chunked_prefill_size": 2048}, {"chunked-prefill-size": "2048"}),
        ({"disable_radix_cache": True}, {"disable-radix-cache": True}),
        ({"sleep_on_idle": False}, {}),
        ({"json_model_override_args": {"a": 1}}, {"json-model-override-args": '{"a": 1}'}),
        ({"log_level_http": "info"}, {"log-level-http": "info"}),
    ],
)
def test_server_args_are_passed_through_and_win(given: dict, expected: dict) -> None:
    found = flags(EngineConfig(server_args=given))
    assert expected.items() <= found.items()
    if given == {"sleep_on_idle": False}:
        assert "sleep-on-idle" not in found


def test_torchrun_does_not_reach_into_the_engine() -> None:
    environment = engine_environment(EngineConfig(), placement(), {}, threads=1, cores=(0,), scratch=SCRATCH)
    assert environment["TMPDIR"] == str(SCRATCH)
    assert environment["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert environment["SGLANG_PLATFORM"] == "asyncrl_cpu"
    assert environment["OMP_NUM_THREADS"] == "1"


def test_an_engine_keeps_idle_connections_longer_than_the_router_does() -> None:
    environment = engine_environment(EngineConfig(), placement(), {}, threads=None, cores=(0,), scratch=SCRATCH)
    assert int(environment["SGLANG_TIMEOUT_KEEP_ALIVE"]) > 90


def test_a_gpu_engine_sees_its_own_gpus_and_stock_sglang() -> None:
    environment = engine_environment(
        EngineConfig(), placement(2, (2, 3)), {}, threads=None, cores=(0,), scratch=SCRATCH
    )
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "SGLANG_PLATFORM" not in environment


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"),
    [((0, 1), 2, "0|1"), ((0, 1, 2, 3), 2, "0,1|2,3"), ((5,), 2, "5|5"), ((0, 1, 2), 2, "0|1")],
)
def test_each_tensor_parallel_rank_gets_cores(cores: tuple[int, ...], ranks: int, expected: str) -> None:
    assert bind_threads(cores, ranks) == expected
    assert (
        engine_environment(EngineConfig(), placement(ranks), {}, threads=1, cores=cores, scratch=SCRATCH)[
            "SGLANG_CPU_OMP_THREADS_BIND"
        ]
        == expected
    )


def test_the_router_judges_engines_by_the_endpoint_that_answers_while_paused() -> None:
    argv = router_argv(RouterConfig(policy="random"), host="127.0.0.1", port=1, prometheus_port=2)
    assert argv[argv.index("--health-check-endpoint") + 1] == "/ping"
    assert argv[argv.index("--prometheus-port") + 1] == "2"
    assert "--disable-retries" in argv
    assert "--disable-circuit-breaker" in argv


def test_router_arguments_are_passed_through_and_win() -> None:
    config = RouterConfig(
        breaker_failures=7, health_interval_s=2, args={"cb_timeout_duration_secs": 3, "log_level": "info"}
    )
    parsed = parse("sglang-router", router_argv(config, host="127.0.0.1", port=1, prometheus_port=2)[4:])
    assert (parsed.cb_failure_threshold, parsed.cb_timeout_duration_secs) == (7, 3)
    assert not parsed.disable_circuit_breaker
    assert parsed.health_check_interval_secs == 2
    assert parsed.log_level == "info"


def test_smg_is_told_that_a_pause_and_a_full_queue_are_normal() -> None:
    argv = router_argv(RouterConfig(package="smg"), host="127.0.0.1", port=1, prometheus_port=2)
    assert argv[3] == "smg"
    assert {"--disable-worker-overload-protection", "--worker-wedge-secs", "--disable-tokenizer-autoload"} <= set(argv)


def test_the_installed_router_knows_every_flag() -> None:
    argv = router_argv(RouterConfig(policy="manual"), host="127.0.0.1", port=1, prometheus_port=2)
    parsed = parse(argv[3], argv[4:])
    assert (parsed.port, parsed.prometheus_port, parsed.policy) == (1, 2, "manual")
    assert parsed.disable_retries
    assert parsed.health_check_endpoint == "/ping"
    assert parsed.disable_circuit_breaker


def test_false_denies_a_switch_that_is_on_by_default() -> None:
    found = flags(EngineConfig(server_args={"enable_dsa_fused_indexer": False, "sleep_on_idle": False}))
    assert found["no-enable-dsa-fused-indexer"] is True
    assert "sleep-on-idle" not in found and "no-sleep-on-idle" not in found
