"""Engines and routers of a job take commands from the job alone."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.errors import EngineError
from asyncrl.inference.routing.router_client import RouterClient
from asyncrl.inference.sglang import private
from asyncrl.inference.sglang.engine_api import EngineApi, EngineRequestError, new_session
from asyncrl.run_directory.engine_key import key_file, make_key, read_key
from tests.inference.conftest import StartFleet

pytestmark = pytest.mark.anyio


async def test_nobody_commands_an_engine_or_a_router_without_the_key_of_the_job(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with start_fleet(1) as fleet:
        await fleet.controller.wait_ready()
        path, engine = key_file(tmp_path), fleet.engines[0]
        key = read_key(path)
        assert key and path.stat().st_mode & 0o777 == 0o600
        assert not any(key in " ".join((*spec.argv, *spec.env.values())) for spec in fleet.host.specs.values())
        async with EngineApi.open("engine-0", engine.url) as anybody:
            assert (await anybody.generate([1])).output_ids
            with pytest.raises(EngineRequestError, match="HTTP 401"):
                await anybody.pause()
        async with new_session() as session:
            with pytest.raises(EngineError, match="HTTP 401"):
                await RouterClient(fleet.router.url, session).workers()
        async with fleet.controller.open_engine("engine-0", engine.url) as client:
            await client.pause()
            await client.resume()
    assert not path.exists()


def test_each_start_has_a_key_of_its_own(tmp_path: Path) -> None:
    first, second = make_key(tmp_path), make_key(tmp_path)
    assert first != second and read_key(key_file(tmp_path)) == second
    assert read_key(tmp_path / "none") is None


def test_a_key_is_in_no_record_of_a_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    made = logging.getLogRecordFactory()
    try:
        private._hide("s3cret")
        logging.getLogger("engine").warning("server_args=%s", {"admin_api_key": "s3cret"})
    finally:
        logging.setLogRecordFactory(made)
    assert caplog.records[0].getMessage() == "server_args={'admin_api_key': '***'}"


STORE = """
import datetime, sys
import psutil, torch.distributed as dist
from asyncrl.inference.sglang import private
private._bind_stores()
store = next(dist.rendezvous(f"tcp://127.0.0.1:{sys.argv[1]}", 0, 1))[0]
store.set("k", "v")
print({c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}, store.get("k"))
"""


def test_the_rendezvous_of_an_engine_listens_on_its_address_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    done = subprocess.run([sys.executable, "-c", STORE, str(port)], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "{'127.0.0.1'} b'v'", done.stderr
