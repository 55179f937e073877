"""Whole jobs on an engine that was there before them and serves the next one after them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from asyncrl.errors import EngineError
from asyncrl.inference.external import claims
from asyncrl.inference.external.same_model import difference
from asyncrl.inference.sglang.engine_api import EngineApi, EngineRequestError, new_session
from asyncrl.weights.transports.broadcast import BroadcastTransport
from tests.system.conftest import RealFleet
from tests.system.jobs import ROOT, refused, run, write_recipe
from tests.weights.fakes import ThreadSource

pytestmark = [pytest.mark.system, pytest.mark.timeout(450)]


def test_a_loop_of_ones_own_runs_over_the_public_components(
    tmp_path: Path, tiny_models: tuple[Path, Path], shared_engine: str
) -> None:
    recipe = write_recipe(tmp_path, tiny_models[0], steps=2, engine_url=shared_engine)
    code, output, started = run(recipe, timeout_s=400, entry=ROOT / "entrypoints" / "own_loop.py")
    assert code == 0, output
    assert json.loads((started.run_dir / "summary.json").read_text())["steps"] == 2


def test_a_reward_that_fails_on_the_first_batch_is_shown_with_what_it_raised(
    tmp_path: Path, tiny_models: tuple[Path, Path], shared_engine: str
) -> None:
    recipe = write_recipe(tmp_path, tiny_models[0], engine_url=shared_engine)
    (tmp_path / "my_rewards.py").write_text("def broken(sample, prompt):\n    return 1 / 0\n")
    message = refused(
        recipe,
        *("--reward.function", "my_rewards:broken", "--reward.args", "{}"),
        timeout_s=400,
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert "my_rewards:broken failed on 9 of the first 16 samples" in message and "division by zero" in message


@pytest.mark.anyio
async def test_a_real_engine_has_one_owner_and_keeps_nothing_of_it(
    serving_fleet: RealFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = "here:/runs/ours", "here:/runs/theirs"
    monkeypatch.setattr(claims, "is_alive", lambda owner: owner == ours)
    endpoint = replace(serving_fleet.controller.fleet().engines[0].endpoint, external=True)
    async with new_session() as session:
        mine = EngineApi("external-0", endpoint.url, session, owner=ours)
        other = EngineApi("external-0", endpoint.url, session, owner=theirs)
        facts = await mine.model_info(), await mine.server_info()
        assert difference(serving_fleet.models[0], *facts) is None
        small = serving_fleet.run_dir / "another-model"
        small.mkdir(exist_ok=True)
        config = json.loads((serving_fleet.models[0] / "config.json").read_text())
        (small / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 1}))
        assert "vocab_size" in str(difference(small, *facts))

        await claims.claim(mine, ours, 10.0)
        await claims.claim(mine, ours, 10.0)  # the next attempt of a run that was killed
        with pytest.raises(EngineError, match=r"belongs to the job in /runs/ours on here"):
            await claims.claim(other, theirs, 10.0)
        await mine.set_version("0.7")
        assert (await mine.generate([5])).meta_info.weight_version == f"0.7@external-0@{ours}"
        assert (await mine.model_info()).weight_version == "0.7"
        assert (await other.model_info()).weight_version != "0.7"

        source = ThreadSource(load_file(serving_fleet.models[0] / "model.safetensors"))
        transport = BroadcastTransport(EngineApi.open, backend="gloo", bucket_bytes=1 << 20, timeout_s=30.0)
        await mine.pause()
        await mine.begin_weight_update()
        assert not (await transport.transfer(source, source.payload, [endpoint])).failures
        name = next(iter(transport._links.values())).group.name
        await transport.aclose()
        source.close()
        with pytest.raises(EngineRequestError, match="does not exist"):
            await mine.destroy_weights_group(name)
        await mine.end_weight_update()
        await mine.resume()
        await claims.give_back(mine, 10.0)
        await claims.claim(other, theirs, 10.0)
        await claims.give_back(other, 10.0)
    await serving_fleet.publish_from_disk(serving_fleet.models[0])
