"""The factories: the order in which they build parts, what is left where one of them fails, how long an epoch is."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from asyncrl import components
from asyncrl.components import (
    RolloutComponents,
    create_rollout_components,
    create_rollout_executor,
    create_train_group,
    start_run,
)
from asyncrl.control import server
from asyncrl.data.batch import RolloutBatch
from asyncrl.data.saved_batch import save_batch
from asyncrl.data.tokenizer import PolicyTokenizer
from asyncrl.debugging.replay import NoEngines, SavedRollouts
from asyncrl.errors import ConfigError, DataError, EngineError, RolloutError, TrainerError
from asyncrl.inference import controller as controller_module
from asyncrl.rollout import executor as executor_module
from asyncrl.run import trackers
from asyncrl.run.pauses import Pauses
from asyncrl.served import declare_models, declared_models
from asyncrl.training import train_group as train_group_module
from tests.run.jobs import a_job
from tests.training.worlds import make_batch

pytestmark = pytest.mark.anyio
ROUTER = "http://127.0.0.1:1"
BUILT = [
    *("controller made", "controller.start", f"trackers of {ROUTER}", "control"),
    *("executor made", "executor.start"),
]


class Rig:
    """A job whose parts note what happens to them; `fails` names the call that raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **sections: Any) -> None:
        self.calls: list[str] = []
        self.fails: dict[str, Exception] = {}
        self.asked_for: list[dict[str, Any]] = []
        """What each executor was made with."""
        self.job = a_job(None, **sections)
        self.job.hosts = {0: "HOST"}
        self.job.layout = SimpleNamespace(
            colocated=False, rewards=SimpleNamespace(node=0), transports=frozenset({"disk"})
        )
        self.job.directory = SimpleNamespace(
            path=tmp_path,
            logs=tmp_path / "logs",
            control=tmp_path / "control",
            attempt=0,
            first_attempt=0,
            weight_version=lambda step: f"0.{step}",
        )
        self._patch(monkeypatch)

    def note(self, call: str) -> None:
        self.calls.append(call)
        if call in self.fails:
            raise self.fails[call]

    def _patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rig = self

        class Controller:
            router_url = ROUTER
            open_engine = None

            def __init__(self, config: Any, **how: Any) -> None:
                rig.note("controller made")
                rig.verify = config.weights.verify

            async def start(self, tasks: Any) -> None:
                rig.note("controller.start")

            def fleet(self) -> Any:
                return SimpleNamespace(model_urls={"judge": "http://127.0.0.1:2"})

            async def pin_eval_fleet(self, hf_dir: Any = None, version: Any = None) -> Any: ...

            def quarantine_engine(self, engine_id: str, reason: str) -> None: ...

            async def dispose(self) -> None:
                rig.note("controller.dispose")

        class Executor:
            def __init__(
                self, config: Any, *, router_url: str, host: Any, trainers: Any, name: str, **how: Any
            ) -> None:
                rig.note("executor made")
                rig.asked_for.append({"config": config, "url": router_url, "trainers": trainers, "name": name})
                self.name = name

            async def start(self, tasks: Any, *, pin_eval_fleet: Any, distrust: Any) -> None:
                assert distrust.__name__ == "quarantine_engine"
                assert declared_models() == {"judge": "http://127.0.0.1:2"}, "before a reward can ask"
                rig.note("executor.start")

            def get_num_rollout_per_epoch(self) -> int:
                rig.note("executor.get_num_rollout_per_epoch")
                return 7

            def engines_paused(self) -> None: ...

            async def dispose(self) -> None:
                rig.note("executor.dispose")

        class Group:
            def __init__(self, config: Any, *, publishing: Any, **how: Any) -> None:
                rig.note("trainer made")

            async def dispose(self) -> None:
                rig.note("trainer.dispose")

        async def start_trackers(job: Any, url: str | None) -> None:
            rig.note(f"trackers of {url}")

        monkeypatch.setattr(controller_module, "InferenceController", Controller)
        monkeypatch.setattr(executor_module, "RolloutExecutor", Executor)
        monkeypatch.setattr(train_group_module, "TrainGroup", Group)
        monkeypatch.setattr(PolicyTokenizer, "load", lambda path: "TOKENIZER")
        monkeypatch.setattr(server, "serve_control", lambda *how: rig.note("control"))
        monkeypatch.setattr(trackers, "start_trackers", start_trackers)

    async def build(self) -> RolloutComponents:
        """Both halves, as `start_run` builds them; then everything is given back."""
        async with self.job.disposal:
            built = await create_rollout_components(self.job)
            await create_train_group(self.job, built)
        return built


@pytest.fixture(autouse=True)
def nothing_is_served_afterwards() -> Any:
    yield
    declare_models({})


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Rig:
    return Rig(monkeypatch, tmp_path)


async def test_engines_boot_before_anything_slow_and_all_is_given_back_in_reverse_order(rig: Rig) -> None:
    built = await rig.build()
    assert rig.calls == [*BUILT, "trainer made", "trainer.dispose", "executor.dispose", "controller.dispose"]
    assert built.num_rollout_per_epoch is None, "the configuration says how many steps there are"
    assert rig.asked_for[0]["url"] == ROUTER and rig.verify == "first"


@pytest.mark.parametrize(
    ("fails", "error"),
    [
        ("controller made", ConfigError("engine.cpus")),
        ("controller.start", ConfigError("router.port is taken")),
        ("executor made", ConfigError("no room for a prompt")),
        ("executor.start", DataError("train.jsonl line 3")),
        ("trainer made", TrainerError("rank 1")),
    ],
)
async def test_where_a_part_fails_its_error_is_raised_and_what_was_built_before_is_given_back(
    rig: Rig, fails: str, error: Exception
) -> None:
    rig.fails[fails] = error
    with pytest.raises(type(error), match=str(error)):
        await rig.build()
    done = [*BUILT, "trainer made"]
    begun = done[: done.index(fails) + 1]
    owed = [
        *(["executor.dispose"] if "executor made" in begun and fails != "executor made" else []),
        *(["controller.dispose"] if fails != "controller made" else []),
    ]
    assert rig.calls == [*begun, *owed]


async def test_an_end_that_fails_leaves_none_of_the_others_out(rig: Rig) -> None:
    rig.fails["executor.dispose"] = EngineError("the end of the executor")
    with pytest.raises(EngineError, match="the end of the executor"):
        await rig.build()
    assert rig.calls[-2:] == ["executor.dispose", "controller.dispose"]


async def test_a_run_in_epochs_is_as_long_as_the_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rig = Rig(monkeypatch, tmp_path, train={"num_steps": None, "num_epochs": 3})
    assert (await rig.build()).num_rollout_per_epoch == 7


async def test_an_epoch_without_a_batch_is_the_users_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rig = Rig(monkeypatch, tmp_path, train={"num_steps": None})
    rig.fails["executor.get_num_rollout_per_epoch"] = DataError("2 prompts do not fill one batch")
    with pytest.raises(DataError, match="do not fill one batch"):
        await rig.build()
    assert rig.calls[-2:] == ["executor.dispose", "controller.dispose"]


async def test_every_trainer_is_known_to_the_executor(rig: Rig) -> None:
    await create_rollout_components(rig.job, ("actor", "critic"))
    assert rig.asked_for[0]["trainers"] == ("actor", "critic")


async def test_another_executor_has_its_name_and_configuration_and_hears_of_pauses(rig: Rig) -> None:
    async with rig.job.disposal:
        built = await create_rollout_components(rig.job)
        other = rig.job.config.model_copy(update={"rollout": rig.job.config.rollout.model_copy(update={"top_k": 5})})
        code = await create_rollout_executor(rig.job, built, name="code", config=other, trainers=("actor",))
        assert code is not built.rollout_executor
        with pytest.raises(ConfigError, match="a second rollout executor needs a name"):
            await create_rollout_executor(rig.job, built, name="")
        with pytest.raises(ConfigError, match=r"debug\.train_only has no engines"):
            await create_rollout_executor(rig.job, built._replace(inference_controller=NoEngines()), name="code")
    assert rig.asked_for[1] == {"config": other, "url": ROUTER, "trainers": ("actor",), "name": "code"}
    assert rig.calls == [*BUILT, *BUILT[-2:], "executor.dispose", "executor.dispose", "controller.dispose"]
    assert isinstance(rig.job.pauses, Pauses) and len(rig.job.pauses._executors) == 2


async def test_without_a_trainer_no_check_overwrites_the_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rig = Rig(monkeypatch, tmp_path, debug={"rollout_only": True})
    await rig.build()
    assert rig.verify == "never" and "trainer made" not in rig.calls


async def test_without_engines_there_are_saved_batches_an_epoch_of_them_and_nobody_to_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    batch: RolloutBatch = make_batch(3)
    save_batch(batch, tmp_path, {})
    debug = {"train_only": True, "load_rollouts": str(tmp_path)}
    rig = Rig(monkeypatch, tmp_path, debug=debug, train={"num_steps": None})
    built = await create_rollout_components(rig.job)
    assert (type(built.inference_controller), type(built.rollout_executor)) == (NoEngines, SavedRollouts)
    assert built.num_rollout_per_epoch == 4 and rig.calls == ["control", "trackers of None"]
    (tmp_path / "empty").mkdir()
    rig = Rig(monkeypatch, tmp_path, debug=debug | {"load_rollouts": str(tmp_path / "empty")})
    with pytest.raises(DataError, match="holds no saved batch"):
        await create_rollout_components(rig.job)


async def test_engines_on_the_trainers_gpus_make_room_before_the_trainer_is_made(rig: Rig) -> None:
    async def make_room(controller: Any) -> None:
        rig.note("room")

    rig.job.turns = SimpleNamespace(make_room=make_room)
    await rig.build()
    assert rig.calls[:8] == [*BUILT, "room", "trainer made"]


async def test_a_run_that_may_not_generate_ahead_is_refused_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rig = Rig(monkeypatch, tmp_path)

    def refuse() -> None:
        raise RolloutError("engines share the trainer's GPUs")

    rig.job.turns = SimpleNamespace(check_overlap=refuse)
    with pytest.raises(RolloutError, match="share the trainer's GPUs"):
        await start_run(rig.job, generates_ahead=True)
    assert rig.calls == []


async def test_a_job_that_is_cancelled_while_it_is_built_gives_back_what_there_is(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hangs(*how: Any) -> Any:
        await anyio.sleep_forever()

    monkeypatch.setattr(components, "_start_executor", hangs)
    with anyio.move_on_after(0.2):
        async with AsyncExitStack() as job:
            rig.job.disposal = await job.enter_async_context(rig.job.disposal)
            await create_rollout_components(rig.job)
    assert rig.calls == [*BUILT[:4], "controller.dispose"]
