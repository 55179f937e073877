"""A real engine of a job takes commands from the job alone."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from asyncrl.data.fleet import UpdateAck
from asyncrl.errors import EngineError
from asyncrl.inference.routing.router_client import RouterClient
from asyncrl.inference.sglang.engine_api import EngineApi, EngineRequestError, new_session
from asyncrl.rollout.requests.engine_queries import AbortProgress, EngineQueries
from asyncrl.run_directory.engine_key import key_file, read_key
from tests.system.conftest import private_fleet

pytestmark = [pytest.mark.anyio, pytest.mark.system]


async def test_an_engine_refuses_others_keeps_its_key_to_itself_and_listens_on_loopback_alone(
    tiny_models: tuple[Path, Path], tmp_path: Path
) -> None:
    async with private_fleet(tiny_models, tmp_path) as fleet:
        key = read_key(path := key_file(tmp_path))
        assert key is not None and path.stat().st_mode & 0o777 == 0o600
        engine = fleet.controller.fleet().engines[0].endpoint
        async with EngineApi.open(engine.engine_id, engine.url) as anybody:
            assert (await anybody.generate([5])).output_ids
            for call in (anybody.pause(), anybody.abort_all(), anybody.update_from_disk(str(tiny_models[1]))):
                with pytest.raises(EngineRequestError) as caught:
                    await call
                assert caught.value.status == 401
        lease = await fleet.controller.begin_weight_update("0.0")
        async with fleet.controller.open_engine(engine.engine_id, engine.url) as client:
            await client.update_from_disk(str(tiny_models[1]))
        await fleet.controller.commit_weight_update(lease.lease_id, [UpdateAck(engine.engine_id, engine.generation)])
        async with new_session() as session:
            with pytest.raises(EngineError, match="HTTP 401"):
                await RouterClient(fleet.controller.router_url, session).add("http://127.0.0.1:9")
        queries, progress = EngineQueries(fleet.controller.router_url, path), AbortProgress()
        await queries.abort(["00000000.000-0000"], progress)
        await queries.aclose()
        assert (progress.engines, progress.heard) == (1, 1)

        processes = psutil.Process(fleet.host.pid).children(recursive=True)
        listening = [c for p in processes for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        assert {connection.laddr.ip for connection in listening} == {"127.0.0.1"}, listening
        for process in processes:
            assert key not in " ".join(process.cmdline()) and key not in str(process.environ())
        logs = sorted((tmp_path / "logs").iterdir())
        assert [log.name for log in logs if key in log.read_text()] == []
        assert "admin_api_key" in (tmp_path / "logs" / "engine-0.log").read_text(), "SGLang logs its arguments"
        assert [log.name for log in logs if log.name != "host.log" and log.stat().st_mode & 0o077] == []
    assert not path.exists()
