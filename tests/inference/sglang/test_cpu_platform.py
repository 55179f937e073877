from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from asyncrl.inference.sglang.cpu_platform import PLATFORM_NAME, activate


def test_the_plugin_is_registered_under_the_name_that_activates_it() -> None:
    found = {entry.name: entry.value for entry in entry_points(group="sglang.srt.platforms")}
    assert found[PLATFORM_NAME] == "asyncrl.inference.sglang.cpu_platform:activate"


@pytest.mark.parametrize("platform", [None, "", "cuda"])
def test_it_stays_out_of_the_way_unless_asked_for(monkeypatch: pytest.MonkeyPatch, platform: str | None) -> None:
    if platform is None:
        monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    else:
        monkeypatch.setenv("SGLANG_PLATFORM", platform)
    assert activate() is None


def test_it_names_its_platform_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", PLATFORM_NAME)
    assert activate() == "asyncrl.inference.sglang.sglang_cpu:AnyCpuPlatform"


def test_asking_costs_no_import_of_sglang_or_torch() -> None:
    code = (
        "import sys, asyncrl.inference.sglang.cpu_platform as p; p.activate();"
        "print([m for m in ('torch', 'sglang', 'aiohttp', 'anyio', 'pydantic') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
