"""Processes and ports are asked of the host of the node that the layout names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from asyncrl.config import Config
from asyncrl.config.layout import RouterPlacement
from asyncrl.inference.controller import InferenceController
from asyncrl.observability.events import EventLog
from tests.inference.conftest import cpu_layout
from tests.scripted import ScriptedEngine, ScriptedHost, ScriptedRouter

pytestmark = pytest.mark.anyio


class Node(ScriptedHost):
    """A node's host, which remembers the ports that were asked of it."""

    def __init__(self, engines: dict[str, ScriptedEngine]) -> None:
        super().__init__(engines, ScriptedRouter())
        self.bases: list[int] = []

    async def reserve_ports(self, offsets: Sequence[int] = (0,)) -> int:
        self.bases.append(await super().reserve_ports(offsets))
        return self.bases[-1]


async def test_a_process_runs_on_the_node_of_its_placement_with_ports_of_that_node(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    layout = cpu_layout(2)
    layout = replace(
        layout,
        engines=(layout.engines[0], replace(layout.engines[1], node=1)),
        router=RouterPlacement("router", 1),
    )
    async with Node({"engine-0": ScriptedEngine()}) as first, Node({"engine-1": ScriptedEngine()}) as second:
        controller = InferenceController(
            Config(),
            hosts={0: first, 1: second},
            events=EventLog(None),
            layout=layout,
            model_path=tmp_path,
            run_dir=tmp_path,
        )
        async with anyio.create_task_group() as task_group:
            await controller.start(task_group)
            await controller.wait_ready()
            urls = [status.endpoint.url for status in controller.fleet().engines]
            assert (first.spawned, sorted(second.spawned)) == (["engine-0"], ["engine-1", "router"])
            assert urls[0] == f"http://127.0.0.1:{first.bases[0]}"
            assert controller.router_url == f"http://127.0.0.1:{second.bases[0]}"
            assert urls[1] == f"http://127.0.0.1:{second.bases[2]}"
            await controller.dispose()
