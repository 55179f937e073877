"""The client of a model that is served beside the trained one, as rewards use it."""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
from aiohttp import web

from asyncrl.errors import ServedModelError
from asyncrl.host import EngineHost
from asyncrl.served import declare_models, declared_models, served_model
from tests.rollout.conftest import *  # noqa: F403
from tests.rollout.conftest import StartExecutor
from tests.scripted.answers import scripted_engine

pytestmark = pytest.mark.anyio
Answer = Callable[[str, dict[str, Any], int], tuple[int, Any]]


def echo(path: str, body: dict[str, Any], number: int) -> tuple[int, Any]:
    if path == "/generate":
        return 200, {"text": f"after {body.get('text', body.get('input_ids'))}", "meta_info": {}}
    return 200, {"choices": [{"message": {"content": f"to {body['messages'][-1]['content']}"}}]}


@asynccontextmanager
async def judge(answer: Answer = echo) -> AsyncIterator[list[dict[str, Any]]]:
    """A model `judge` that is served; yields the requests that it got."""
    asked: list[dict[str, Any]] = []

    async def handle(request: web.Request) -> web.Response:
        body = await request.json()
        status, text = answer(request.path, body, len(asked))
        asked.append(body)
        return web.Response(status=status, text=text if isinstance(text, str) else json.dumps(text))

    app = web.Application()
    app.router.add_post("/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        declare_models({"judge": f"http://127.0.0.1:{runner.addresses[0][1]}"})
        yield asked
    finally:
        declare_models({})
        await runner.cleanup()


async def ask(how: str, method: str, *args: Any, **params: Any) -> str:
    model = served_model("judge")
    if how == "async":
        return str(await getattr(model, f"{method}_async")(*args, **params))
    return await anyio.to_thread.run_sync(lambda: getattr(model, method)(*args, **params))


@pytest.mark.parametrize("how", ["sync", "async"])
async def test_a_model_answers_a_chat_and_goes_on_after_a_text(how: str) -> None:
    async with judge() as asked:
        assert await ask(how, "chat", "good?", max_tokens=4) == "to good?"
        assert await ask(how, "chat", [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]) == "to u"
        assert await ask(how, "complete", "1+1=", max_new_tokens=3, temperature=0.5) == "after 1+1="
        assert await ask(how, "complete", [5, 6]) == "after [5, 6]"
    assert (asked[0]["model"], asked[0]["max_tokens"], asked[0]["temperature"]) == ("judge", 4, 0.0)
    assert asked[2]["sampling_params"] == {"max_new_tokens": 3, "temperature": 0.5}


@pytest.mark.parametrize("how", ["sync", "async"])
async def test_a_full_queue_is_waited_out_and_a_refusal_is_not(how: str) -> None:
    def busy(path: str, body: dict[str, Any], number: int) -> tuple[int, Any]:
        return (503, "full") if number < 2 else echo(path, body, number)

    async with judge(busy) as asked:
        assert await ask(how, "chat", "good?") == "to good?" and len(asked) == 3
    async with judge(lambda *request: (400, "too long")) as asked:
        with pytest.raises(ServedModelError, match=r"'judge' refuses: HTTP 400: too long"):
            await ask(how, "chat", "good?")
        assert len(asked) == 1


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ({"object": "error", "message": "max_tokens is too large", "code": 400}, "HTTP 400: max_tokens is too large"),
        ({"message": "tokenizer.chat_template is not set and no ..."}, "its tokenizer has no chat template; ask it by"),
        ({"message": None}, r'HTTP 400: \{"message": null\}'),
        (["message"], r'HTTP 400: \["message"\]'),
    ],
)
async def test_a_refusal_is_told_by_its_message(answer: Any, told: str) -> None:
    async with judge(lambda *request: (400, answer)):
        with pytest.raises(ServedModelError, match=rf"'judge' refuses: {told}"):
            await ask("async", "chat", "good?")


@pytest.mark.parametrize("how", ["sync", "async"])
async def test_a_call_ends_in_time_whatever_the_model_does(how: str) -> None:
    async with judge(lambda *request: (503, "full")):
        with pytest.raises(ServedModelError, match=r"within 0.3 s; last: HTTP 503: full"):
            await ask(how, "chat", "good?", timeout_s=0.3)
    for nonsense in ("no json", {"choices": []}, "[" * 100_000):
        async with judge(lambda *request, text=nonsense: (200, text)):
            with pytest.raises(ServedModelError, match="without a text"):
                await ask(how, "chat", "good?")
    declare_models({"judge": "http://127.0.0.1:1"})
    with pytest.raises(ServedModelError, match=r"within 0.2 s; last: .*(Connect|connect)"):
        await ask(how, "complete", "x", timeout_s=0.2)
    declare_models({})


def test_a_model_that_is_not_served_is_named_with_those_that_are() -> None:
    declare_models({"reference": "http://127.0.0.1:1"})
    with pytest.raises(ServedModelError, match=r"no model is served as 'judge'; there are: reference \(each"):
        served_model("judge")
    declare_models({})
    assert declared_models() == {}


REWARDS = """
from asyncrl.served import served_model

def sync(sample, prompt):
    return float(served_model("judge").chat(sample.text) == f"to {sample.text}")

async def asynchronous(sample, prompt):
    return float(await served_model("judge").chat_async(sample.text) == f"to {sample.text}")
"""


@pytest.mark.parametrize(("function", "workers"), [("sync", 1), ("sync", 0), ("asynchronous", 0)])
async def test_rewards_ask_a_judge_wherever_they_run(
    start_executor: StartExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, workers: int
) -> None:
    (tmp_path / "judged.py").write_text(inspect.cleandoc(REWARDS))
    monkeypatch.syspath_prepend(tmp_path)
    reward = {"function": f"judged:{function}", "workers": workers}
    async with (
        judge() as asked,
        EngineHost.start(tmp_path) as host,
        scripted_engine() as engine,
        start_executor(engine, host=host, reward=reward) as executor,
    ):
        batch = await executor.get(0)
    assert batch.rewards.tolist() == [1.0] * 12 and len(asked) == 12
