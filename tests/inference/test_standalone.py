"""`asyncrl engine MODEL`: an engine that outlives jobs."""

from __future__ import annotations

import json
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from asyncrl import cli
from asyncrl.config.machine import Machine
from asyncrl.config.sections.inference import ServedModelConfig
from asyncrl.errors import ConfigError
from asyncrl.host import ProcessSpec
from asyncrl.inference import standalone
from asyncrl.inference.standalone import run_engine, standalone_engine

CPU = Machine(world_size=1, local_world_size=1)
GPUS = Machine(world_size=1, local_world_size=1, gpus=("GPU-a", "GPU-b"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def three_free_ports() -> int:
    while True:
        with ExitStack() as stack:
            first = stack.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                for offset in (1, 2):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port + offset))
            except OSError:
                continue
            return port


def launched(settings: ServedModelConfig, machine: Machine) -> tuple[str, dict[str, str]]:
    spec = standalone_engine(settings, port=30000, host="127.0.0.1", machine=machine)
    return " ".join(spec.argv), spec.env


def test_it_is_launched_as_a_job_launches_its_own(model: Path) -> None:
    line, environment = launched(ServedModelConfig(path=model, max_total_tokens=4096), CPU)
    assert f"--model-path {model} --host 127.0.0.1 --port 30000 --nccl-port 30001" in line
    assert "--device cpu --dtype float32" in line and "--max-total-tokens 4096" in line
    assert environment["SGLANG_PLATFORM"] == "asyncrl_cpu" and environment["OMP_NUM_THREADS"] == "1"
    line, environment = launched(ServedModelConfig(path=model, tensor_parallel=2), GPUS)
    assert "--device cuda --dtype bfloat16" in line and environment["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"


def test_what_cannot_start_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no Hugging Face model directory"):
        launched(ServedModelConfig(path=tmp_path / "absent"), CPU)
    with pytest.raises(ConfigError, match="3 ranks on as many GPUs, and 2 visible"):
        launched(ServedModelConfig(path=model, tensor_parallel=3), GPUS)


def test_a_small_model_has_one_thread_and_a_large_one_its_share(model: Path) -> None:
    machine = Machine(cpus=tuple(range(8)))
    weights = model / "model.safetensors"
    for size, threads in ((99_000_000, "1"), (100_000_000, "4")):
        with weights.open("wb") as file:
            file.truncate(size)
        assert launched(ServedModelConfig(path=model), machine)[1]["OMP_NUM_THREADS"] == threads
    machine = Machine(cpus=tuple(range(8)), omp_threads=2)
    weights.unlink()
    assert launched(ServedModelConfig(path=model), machine)[1]["OMP_NUM_THREADS"] == "2"


def test_a_port_that_is_taken_is_named_before_the_engine_starts(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port: the engine cannot listen at 127.0.0.1:{port} "):
            run_engine(ServedModelConfig(path=model), port=port - 1, host="127.0.0.1")


def test_the_command_runs_the_engine_under_a_guardian_and_says_how_a_job_takes_it(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port, ran = three_free_ports(), list[ProcessSpec]()
    monkeypatch.setattr(standalone, "run_in_foreground", lambda spec, grace_s: ran.append(spec) or 130)
    monkeypatch.setattr(sys, "argv", ["asyncrl", "engine", str(model), "--port", str(port), "--context-length", "256"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 130
    [spec] = ran
    assert spec.argv[0] == sys.executable and "--context-length 256" in " ".join(spec.argv)
    assert spec.env["SGLANG_PLATFORM"] == "asyncrl_cpu" and spec.env["TMPDIR"] == spec.scratch
    assert f"--engine.external http://127.0.0.1:{port}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fields", "backend"),
    [
        ({"head_dim": 32}, "triton"),
        ({"hidden_size": 192, "num_attention_heads": 6}, "triton"),
        ({"head_dim": 64}, None),
        ({"head_dim": None, "hidden_size": 4096, "num_attention_heads": 32}, None),
        ({"text_config": {"head_dim": 32}}, None),
    ],
)
def test_heads_that_are_too_small_for_the_usual_kernels_of_a_gpu_get_others(
    model: Path, fields: dict[str, Any], backend: str | None
) -> None:
    (model / "config.json").write_text(json.dumps(fields))
    settings = ServedModelConfig(path=model)
    line, _ = launched(settings, GPUS)
    assert ("--attention-backend triton" in line) == (backend == "triton")
    assert "--attention-backend" not in launched(settings, CPU)[0]
    chosen = ServedModelConfig(path=model, server_args={"attention_backend": "fa3"})
    assert "--attention-backend fa3" in launched(chosen, GPUS)[0]
