"""What the doctor says of GPUs, by facts that no CPU machine has."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.doctor import gpus
from asyncrl.doctor.finding import Finding
from asyncrl.doctor.gpus import GpuFacts, SeenGpu, Tools, compilers, devices, driver, nccl

GIB = 1 << 30
H100 = SeenGpu("GPU-0", "NVIDIA H100", (9, 0), 80 * GIB, GIB)
WELL = GpuFacts(
    gpus=tuple(replace(H100, uuid=f"GPU-{i}") for i in range(8)),
    driver="580.65.06",
    driver_cuda=(13, 0),
    device_files=True,
    torch_cuda=(13, 0),
    torch_gpus=8,
    nccl_built=(2, 30, 7),
    nccl_loaded=(2, 30, 7),
    nccl_installed="2.30.7",
)
TOOLS = Tools("/usr/bin/gcc", "/usr/bin/g++", True, "/usr/local/cuda/bin/nvcc")


def all_of(facts: GpuFacts, tools: Tools = TOOLS) -> list[Finding]:
    return [driver(facts), *devices(facts), *nccl(facts), *compilers(facts, tools)]


def bad(facts: GpuFacts, tools: Tools = TOOLS) -> Finding:
    """The only finding that is not ok; it says how to mend it."""
    [found] = [finding for finding in all_of(facts, tools) if finding.level != "ok"]
    assert found.mend
    return found


def test_a_gpu_machine_that_is_well_and_one_without_gpus_have_nothing_to_mend() -> None:
    assert {finding.level for finding in all_of(WELL)} == {"ok"}
    assert "8 x NVIDIA H100" in all_of(WELL)[1].seen
    [only] = all_of(GpuFacts(torch_cuda=(13, 0)))
    assert only.level == "ok" and "CPU" in only.seen


def test_a_driver_that_is_older_than_the_wheels_is_named_with_the_oldest_that_runs_them() -> None:
    facts = replace(WELL, driver="570.86.10", driver_cuda=(12, 8), torch_gpus=0)
    first, second = [finding for finding in all_of(facts) if finding.level == "failed"]
    assert first.check == "driver" and "570.86.10" in first.seen and "driver 580 or newer" in first.mend
    assert second.check == "GPUs" and "the driver shows 8, torch 0" in second.seen


def test_a_newer_minor_version_of_the_wheels_runs_on_a_driver_of_the_same_major_one() -> None:
    assert driver(replace(WELL, torch_cuda=(13, 5))).level == "ok"
    assert driver(replace(WELL, driver_cuda=(14, 0))).level == "ok"


def test_a_container_without_the_drivers_library_is_not_taken_for_a_machine_without_gpus() -> None:
    facts = GpuFacts(device_files=True, nvml_error="NVML Shared Library Not Found", torch_cuda=(13, 0))
    assert bad(facts).level == "failed" and "NVML Shared Library" in bad(facts).seen and "--gpus" in bad(facts).mend


@pytest.mark.parametrize(("mask", "seen_by_torch", "level"), [("0,1", 2, "ok"), ("", 0, "ok"), ("0,1", 8, "failed")])
def test_torch_must_see_what_a_job_plans_with_under_the_mask(mask: str, seen_by_torch: int, level: str) -> None:
    found, *_ = devices(replace(WELL, mask=mask, torch_gpus=seen_by_torch))
    assert found.level == level and f"CUDA_VISIBLE_DEVICES={mask}" in found.seen


def test_memory_that_others_hold_and_gpus_without_bfloat16_are_told() -> None:
    busy = (replace(H100, used_bytes=40 * GIB), *WELL.gpus[1:])
    assert "GPU 0 42.9 GB" in bad(replace(WELL, gpus=busy)).seen
    t4 = replace(H100, name="Tesla T4", capability=(7, 5))
    assert 'model.dtype = "float32"' in bad(replace(WELL, gpus=(t4,), torch_gpus=1)).mend


def test_another_nccl_than_that_of_the_wheels_is_told() -> None:
    older = bad(replace(WELL, nccl_loaded=(2, 21, 5)))
    assert older.level == "failed" and "2.21.5 is loaded" in older.seen and "LD_LIBRARY_PATH" in older.mend
    assert bad(replace(WELL, nccl_loaded=(2, 31, 0))).level == "warning"
    assert bad(replace(WELL, nccl_loaded=None)).level == "failed"


def test_what_compiles_kernels_must_be_there() -> None:
    assert bad(WELL, replace(TOOLS, cc=None)).level == "failed"
    assert "Python.h" in bad(WELL, replace(TOOLS, headers=False)).seen
    assert bad(WELL, replace(TOOLS, nvcc=None)).level == "warning"
    assert "CUDA 13 toolkit" in bad(WELL, replace(TOOLS, cxx=None)).mend


def test_the_facts_are_asked_of_nvml_as_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers as the driver gives them: 13000 is CUDA 13.0, memory is in bytes, a capability is a pair."""
    pynvml = pytest.importorskip("pynvml")
    answers: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetCudaDriverVersion_v2": lambda: 12080,
        "nvmlSystemGetDriverVersion": lambda: "570.86.10",
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=80 * GIB, used=GIB),
        "nvmlDeviceGetUUID": lambda handle: "GPU-0",
        "nvmlDeviceGetName": lambda handle: "NVIDIA H100",
        "nvmlDeviceGetCudaComputeCapability": lambda handle: [9, 0],
    }
    for name, answer in answers.items():
        assert callable(getattr(pynvml, name))
        monkeypatch.setattr(pynvml, name, answer)
    facts = gpus.look()
    assert facts.gpus == (H100,) and (facts.driver, facts.driver_cuda) == ("570.86.10", (12, 8))
    assert facts.nccl_built is not None and facts.nccl_loaded == facts.nccl_built


def test_what_nvml_refuses_is_a_fact_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = pytest.importorskip("pynvml")

    def refuse() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    facts = gpus.look()
    assert facts.gpus == () and "mismatch" in (facts.nvml_error or "")
