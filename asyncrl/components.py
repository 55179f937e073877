"""Builds the parts of a job: the only place that knows everybody.

A user's own loop imports from here, and from nowhere else.

Invariants
- Engines and router boot while data is read and the trainer initialises; nothing waits for them until
  `engines.wait_ready`. Only where both share GPUs, the engines come first and give memory up.
- What was built is disposed of in reverse order when the job ends, also when a later part failed to build; the
  first error is the one that is raised.
- Importing this module is cheap (`--help` answers in under a second): a part is imported when it is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import anyio.to_thread

from asyncrl.data.staleness import overlaps
from asyncrl.driver import run_job
from asyncrl.errors import ConfigError
from asyncrl.run.job import Job
from asyncrl.run.loop import Run
from asyncrl.run.parts import RolloutComponents, TrainingPart
from asyncrl.served import declare_models

if TYPE_CHECKING:
    from asyncrl.config import Config
    from asyncrl.inference.controller import InferenceController
    from asyncrl.rollout.executor import RolloutExecutor
    from asyncrl.training.train_group import Publishing


async def start_run(job: Job, *, generates_ahead: bool = False) -> Run:
    """Builds all parts of the job and starts a run over them; see `Run.start`.

    A loop that builds some part in another way calls `create_rollout_components`, `create_train_group` and `Run.start`.
    Raises what these three raise.
    """
    if generates_ahead:
        job.turns.check_overlap()
    with job.record.phase("startup"):
        components = await create_rollout_components(job, generates_ahead=generates_ahead)
        trainer = await create_train_group(job, components)
    return await Run.start(job, components, trainer, generates_ahead=generates_ahead)


async def create_rollout_components(
    job: Job, trainers: Sequence[str] = ("trainer",), *, generates_ahead: bool = False
) -> RolloutComponents:
    """Starts engines and router, and the executor in front of them; returns while the engines still boot.

    Where several `trainers` train on every batch, each names itself in `executor.get` and `executor.commit`. Engines of
    a loop that `generates_ahead` leave cores to the trainer, on a CPU.
    Raises ConfigError, ModelError, DataError or RewardError for what the user can mend.
    """
    from asyncrl.control.server import serve_control
    from asyncrl.inference.controller import InferenceController
    from asyncrl.inference.engine_commands import EngineCommands, refuse_without_engines
    from asyncrl.run.trackers import start_trackers

    if job.config.debug.train_only:
        serve_control(job.task_group, job.directory.control, refuse_without_engines)
        await start_trackers(job, None)
        return _without_engines(job)
    controller = InferenceController(
        _config_of_engines(job.config),
        hosts=job.hosts,
        events=job.events,
        layout=job.layout,
        model_path=job.config.model.path,
        run_dir=job.directory.path,
        overlaps=generates_ahead and overlaps(job.config),
    )
    job.disposal.push_async_callback(controller.dispose)
    await controller.start(job.task_group)
    await start_trackers(job, controller.router_url)
    serve_control(job.task_group, job.directory.control, EngineCommands(controller))
    declare_models(controller.fleet().model_urls)

    # torch and transformers take seconds to import; by now the engines are importing theirs.
    executor = await _start_executor(job, job.config, controller, trainers)
    await job.turns.make_room(controller)
    per_epoch = executor.get_num_rollout_per_epoch() if job.config.train.num_steps is None else None
    return RolloutComponents(controller, executor, per_epoch)


async def create_rollout_executor(
    job: Job,
    components: RolloutComponents,
    *,
    name: str,
    config: Config | None = None,
    trainers: Sequence[str] = ("trainer",),
) -> RolloutExecutor:
    """Another executor in front of the engines of `components` (`run.components`): another task, other sampling.

        code = await create_rollout_executor(job, run.components, name="code", config=job.config.model_copy(update=...))
        await run.add_executor(code)             # from now on it is in every checkpoint
        batch = await code.get(step)             # train on it, then
        await code.commit(step)

    Args:
        name: what tells its groups, events, files and processes from those of others.
        config: what it samples, from which data, with which reward; None: what the job says.
        trainers: as for `create_rollout_components`.

    Raises ConfigError for a name that is no word and for a job without engines, DataError and RewardError as a start
    does.
    """
    from asyncrl.inference.controller import InferenceController

    controller = components.inference_controller
    if not name:
        raise ConfigError("a second rollout executor needs a name; the one without a name is that of the components")
    if not isinstance(controller, InferenceController):
        raise ConfigError(f"debug.train_only has no engines that a rollout executor {name!r} could ask")
    return await _start_executor(job, config or job.config, controller, trainers, name)


async def _start_executor(
    job: Job, config: Config, controller: InferenceController, trainers: Sequence[str], name: str = ""
) -> RolloutExecutor:
    executor = await anyio.to_thread.run_sync(
        _build_executor, job, config, controller.router_url, trainers, name, abandon_on_cancel=True
    )
    job.disposal.push_async_callback(executor.dispose)
    await executor.start(
        job.task_group, pin_eval_fleet=controller.pin_eval_fleet, distrust=controller.quarantine_engine
    )
    job.pauses.add(executor)
    return executor


def _config_of_engines(config: Config) -> Config:
    """Without a trainer nothing is sent to them, so that a check whether it arrived could only fail."""
    if not config.debug.rollout_only:
        return config
    return config.model_copy(update={"weights": config.weights.model_copy(update={"verify": "never"})})


def _without_engines(job: Job) -> RolloutComponents:
    from asyncrl.debugging.replay import NoEngines, SavedRollouts

    assert job.config.debug.load_rollouts is not None, "refused with the configuration"
    executor = SavedRollouts(job.config.debug.load_rollouts, job.stop)
    per_epoch = executor.get_num_rollout_per_epoch() if job.config.train.num_steps is None else None
    return RolloutComponents(NoEngines(), executor, per_epoch)


def _build_executor(job: Job, config: Config, router_url: str, trainers: Sequence[str], name: str) -> RolloutExecutor:
    from asyncrl.data.tokenizer import PolicyTokenizer
    from asyncrl.rollout.executor import RolloutExecutor

    return RolloutExecutor(
        config,
        router_url=router_url,
        host=job.hosts[job.layout.rewards.node],
        events=job.events,
        tokenizer=PolicyTokenizer.load(job.config.model.path),
        log_dir=job.directory.logs,
        trainers=trainers,
        name=name,
    )


async def create_train_group(job: Job, components: RolloutComponents) -> TrainingPart:
    """The trainer over all ranks, ready for `init`; it publishes to the engines of `components`.

    Half a job (`debug`) has a trainer without engines, or none.
    """
    if job.config.debug.train_only:
        return _replaying(job)
    if job.config.debug.rollout_only:
        from asyncrl.debugging.trainers import NoTrainer

        version = job.directory.weight_version(0)
        return NoTrainer(components.inference_controller, job.config.model.path, version)
    from asyncrl.training.train_group import TrainGroup

    trainer = TrainGroup(
        job.config,
        task_group=job.task_group,
        background=job.background,
        events=job.events,
        publishing=_publishing(job, components),
        first_attempt=job.directory.first_attempt,
    )
    job.disposal.push_async_callback(trainer.dispose)
    return trainer


def _publishing(job: Job, components: RolloutComponents) -> Publishing:
    """How the trainer publishes to the engines of `components`."""
    from asyncrl.run.pauses import ToldFleet
    from asyncrl.training.train_group import Publishing
    from asyncrl.weights.copies import make_copies
    from asyncrl.weights.publication import PublicationLimits
    from asyncrl.weights.publisher import Publisher
    from asyncrl.weights.transports import make_transport

    controller = components.inference_controller
    (transport,) = job.layout.transports  # the layout refuses others
    copies = make_copies(job.config, job.background)
    if copies is not None:
        job.disposal.push_async_callback(copies.aclose)
    make_publisher = partial(
        Publisher,
        ToldFleet(controller, job.pauses),
        transport=make_transport(job.config, transport, open_engine=controller.open_engine),
        events=job.events,
        copies=copies,
        limits=PublicationLimits.of(job.config),
    )
    return Publishing(make_publisher, version_of=job.directory.weight_version)


def _replaying(job: Job) -> TrainingPart:
    from asyncrl.debugging.replay import COMPARISON, Replay
    from asyncrl.debugging.trainers import ReplayingTrainGroup

    debug = job.config.debug
    assert debug.load_rollouts is not None, "refused with the configuration"
    trainer = ReplayingTrainGroup(
        job.config,
        task_group=job.task_group,
        events=job.events,
        background=job.background,
        first_attempt=job.directory.first_attempt,
        replay=Replay(
            debug.load_rollouts,
            tolerance=debug.tolerance,
            report=job.directory.path / COMPARISON,
            events=job.events,
            note=job.record.note,
        ),
    )
    job.disposal.push_async_callback(trainer.dispose)
    return trainer


__all__ = [
    "Job",
    "RolloutComponents",
    "Run",
    "create_rollout_components",
    "create_rollout_executor",
    "create_train_group",
    "run_job",
    "start_run",
]
