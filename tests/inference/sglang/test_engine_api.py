"""Control calls against a server that misbehaves in every way a server can."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import anyio
import pytest
from aiohttp import web

from asyncrl.inference.sglang.engine_api import EngineApi, EngineRequestError
from asyncrl.observability.waits import WAITS
from asyncrl.weights.buckets import TensorSpec

pytestmark = pytest.mark.anyio

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Answers everything with `handler`; remembers what was asked."""

    def __init__(self) -> None:
        self.handler: Handler | None = None
        self.seen: list[tuple[str, str, dict]] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else {}
        self.seen.append((request.method, request.path_qs, body))
        assert self.handler is not None
        return await self.handler(request)

    def reply(self, status: int = 200, **body: object) -> None:
        async def handler(request: web.Request) -> web.Response:
            return web.json_response(body, status=status)

        self.handler = handler

    def reply_text(self, text: str, status: int = 200) -> None:
        async def handler(request: web.Request) -> web.Response:
            return web.Response(text=text, status=status)

        self.handler = handler


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    server.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    yield server
    await runner.cleanup()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[EngineApi]:
    async with EngineApi.open("engine-7", server.url) as client:
        yield client


async def test_a_refusal_carries_engine_endpoint_status_and_an_excerpt(server: Server, client: EngineApi) -> None:
    server.reply_text("x" * 5000, 503)
    with pytest.raises(EngineRequestError, match=r"^engine-7: /pause_generation: HTTP 503: x+ \.\.\.$") as error:
        await client.pause()
    assert error.value.status == 503
    assert len(str(error.value)) < 1000


async def test_success_false_with_status_200_is_a_refusal(server: Server, client: EngineApi) -> None:
    server.reply(success=False, message="partially updated")
    with pytest.raises(EngineRequestError, match="partially updated"):
        await client.update_from_disk("/m")


async def test_a_body_that_is_no_json_or_lacks_fields_is_told_with_an_excerpt(
    server: Server, client: EngineApi
) -> None:
    server.reply_text("<html>proxy</html>")
    with pytest.raises(EngineRequestError, match="<html>proxy"):
        await client.model_info()
    server.reply(weight_version="1")
    with pytest.raises(EngineRequestError, match="model_path"):
        await client.model_info()


async def test_an_engine_that_hangs_costs_no_more_than_the_deadline_and_is_named_meanwhile(
    server: Server, client: EngineApi
) -> None:
    reached = anyio.Event()

    async def hang(request: web.Request) -> web.Response:
        reached.set()
        await anyio.sleep_forever()

    server.handler = hang
    raised: list[EngineRequestError] = []

    async def call() -> None:
        try:
            await client.begin_weight_update(timeout_s=0.3)
        except EngineRequestError as error:
            raised.append(error)

    async with anyio.create_task_group() as task_group:
        task_group.start_soon(call)
        await reached.wait()
        assert [(wait.what, wait.subject) for wait in WAITS.snapshot()] == [("begin_weight_update", "engine-7")]
    assert raised[0].status is None
    assert "no begin_weight_update from engine-7 after 0.3 s" in str(raised[0])


async def test_nobody_at_the_port_and_a_broken_answer_are_no_answer(server: Server, client: EngineApi) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        async with EngineApi.open("engine-8", f"http://127.0.0.1:{free.getsockname()[1]}") as nobody:
            with pytest.raises(EngineRequestError, match=r"engine-8: /ping: no answer: .*Connect call failed"):
                await nobody.ping()

    async def truncate(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b"{")
        assert request.transport is not None
        request.transport.abort()
        return response

    server.handler = truncate
    with pytest.raises(EngineRequestError, match="engine-7: /model_info: no answer"):
        await client.model_info()


async def test_a_version_stamp_never_aborts_running_requests(server: Server, client: EngineApi) -> None:
    server.reply(success=True)
    await client.set_version("0.3")
    expected = {"new_version": "0.3@engine-7", "abort_all_requests": False}
    assert server.seen == [("POST", "/update_weight_version", expected)]


async def test_a_stamp_names_the_engine_and_is_read_without_its_name(server: Server, client: EngineApi) -> None:
    server.reply(model_path="m", weight_version="0.3@engine-7")
    assert (await client.model_info()).weight_version == "0.3"
    runs = [{"version": "0.2@engine-7", "start": 0, "end": 1}, {"version": "0.3@engine-7", "start": 1, "end": 2}]
    meta = {"weight_version": "0.3@engine-7", "completion_tokens": 2, "weight_versions": runs}
    server.reply(output_ids=[1, 2], meta_info=meta)
    told = (await client.generate([1])).meta_info
    assert told.weight_version == "0.3" and [run.version for run in told.weight_versions] == ["0.2", "0.3"]


async def test_a_bucket_is_announced_with_names_types_and_shapes_in_order(server: Server, client: EngineApi) -> None:
    server.reply(success=True)
    specs = [TensorSpec("b", "float32", (2, 3)), TensorSpec("a", "bfloat16", (4,))]
    await client.update_from_distributed(specs, group_name="g", flattened=True, flush_cache=False, timeout_s=5)
    assert server.seen[0][2] == {
        "names": ["b", "a"],
        "dtypes": ["float32", "bfloat16"],
        "shapes": [[2, 3], [4]],
        "group_name": "g",
        "load_format": "flattened_bucket",
        "flush_cache": False,
    }


async def test_proxies_of_the_environment_are_ignored(
    server: Server, client: EngineApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    server.reply(model_path="m", weight_version="0.1")
    assert (await client.model_info()).weight_version == "0.1"
