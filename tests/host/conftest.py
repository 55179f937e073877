from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.host import EngineHost, ProcessSpec
from asyncrl.observability.events import EventLog
from tests.host.roster import Roster

HERE = Path(__file__).parent
PYTHON = (sys.executable, "-I", "-S")


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
async def roster(tmp_path: Path) -> AsyncIterator[Roster]:
    opened = Roster(tmp_path / "roster")
    yield opened
    opened.close()


@pytest.fixture
def events() -> EventLog:
    return EventLog(None)


@pytest.fixture
async def host(tmp_path: Path, events: EventLog) -> AsyncIterator[EngineHost]:
    async with EngineHost.start(tmp_path / "logs", events) as running:
        yield running


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., ProcessSpec]:
    """A ProcessSpec that runs a line of Python."""

    def spec(name: str, code: str, *args: str, **fields: Any) -> ProcessSpec:
        return ProcessSpec(name, (*PYTHON, "-c", code, *args), log_path=str(tmp_path / f"{name}.log"), **fields)

    return spec


@pytest.fixture
def tree(tmp_path: Path, roster: Roster) -> Callable[[str], ProcessSpec]:
    """A ProcessSpec of the stubborn tree (3 processes that sign in at the roster)."""

    def spec(name: str) -> ProcessSpec:
        argv = (*PYTHON, str(HERE / "tree.py"), str(roster.path))
        return ProcessSpec(name, argv, log_path=str(tmp_path / f"{name}.log"))

    return spec
