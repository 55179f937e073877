"""Turns: who may use the GPUs, where engines share them with the trainer.

There are two forms, and the layout decides between them once, when the job begins. With `SeparateGpus` engines and
trainer have GPUs of their own, so that nobody waits. With `ColocatedGpus` they take turns:

    engines' turn    generate                                                  generate
    trainer's turn             trainers_turn: train, save    publish: export

Invariants of shared GPUs
- The trainer's turn is a pause of the engines, and executors hear of it. Groups that no batch took wait in the engines.
- Weights are exported while they are on the device, and only then leave it. The rest of the trainer leaves before the
  engines' weights come back, and the weights before the rest of the engines' memory does.
- A publication ends the trainer's turn for the executors, also a publication that fails.
- Engines that all ended in the trainer's turn are started again before their publication, once.
- Each step of a change of turns may be taken twice, so a change may begin wherever an earlier one was cancelled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Protocol

from asyncrl.config import Config
from asyncrl.config.layout import ProcessLayout
from asyncrl.errors import ConfigError, EnginesLostError

if TYPE_CHECKING:  # torch stays out of the driver until the engines are on their way
    from asyncrl.run.parts import InferencePart, TrainingPart
    from asyncrl.run.pauses import Pause, Pauses
    from asyncrl.weights.publication import PublicationReport


class Turns(Protocol):
    """Who may use the GPUs; see the module's docstring. The job has one for all of its parts."""

    @property
    def engines_wait(self) -> bool:
        """Whether engines generate nothing before the next publication."""

    def check_overlap(self) -> None:
        """Raises ConfigError where engines cannot generate while the trainer trains."""

    async def make_room(self, engines: InferencePart) -> None:
        """Engines give memory up before the trainer is built. Raises EngineError when an engine does not start."""

    async def trainers_turn(self, engines: InferencePart, trainer: TrainingPart) -> None:
        """The trainer may compute from now on, until the next publication.

        Raises EngineError for engines that do not give up their memory.
        """

    async def publish(
        self, engines: InferencePart, trainer: TrainingPart, rollout_id: int | None
    ) -> PublicationReport | None:
        """Brings the engines to the trainer's weights after rollout `rollout_id`; then engines may generate.

        Returns None where half a job runs (`debug`) and nothing is published. Raises WeightUpdateError as
        `TrainGroup.update_weights` does.
        """


class SeparateGpus:
    """Engines and trainer work at the same time."""

    engines_wait = False

    def check_overlap(self) -> None:
        """Engines can generate at any time."""

    async def make_room(self, engines: InferencePart) -> None:
        """Nobody is in the way."""

    async def trainers_turn(self, engines: InferencePart, trainer: TrainingPart) -> None:
        """It always is."""

    async def publish(
        self, engines: InferencePart, trainer: TrainingPart, rollout_id: int | None
    ) -> PublicationReport | None:
        """Publishes to engines that go on afterwards."""
        return await trainer.update_weights(rollout_id)


class ColocatedGpus:
    """Engines give their memory up while the trainer computes."""

    def __init__(self, pauses: Pauses, peak_device: Literal["gpu", "cpu"], note: Callable[[str], None]) -> None:
        """`peak_device`: where the weights of engines wait while the trainer is built; `note` gets a line to show."""
        self._pauses = pauses
        self._peak_device = peak_device
        self._note = note
        self._pause: Pause | None = None
        """The trainer's turn, as the executors hear of it."""
        self.engines_wait = False
        """Whether it is the trainer's turn."""

    def check_overlap(self) -> None:
        """Raises ConfigError."""
        raise ConfigError(
            "engine.gpus: engines that share the trainer's GPUs cannot generate while it trains; give them GPUs of "
            "their own, or run entrypoints/train.py"
        )

    async def make_room(self, engines: InferencePart) -> None:
        """The trainer's turn begins. (Executors need not hear of it before there is a trainer.)"""
        self.engines_wait = True
        await engines.wait_ready()
        if self._peak_device == "gpu":
            await engines.offload_kv()
        else:
            await engines.offload()

    async def trainers_turn(self, engines: InferencePart, trainer: TrainingPart) -> None:
        """Engines leave the GPUs, and the trainer comes back to them."""
        self.engines_wait = True
        self._tell()
        await engines.offload()
        await trainer.onload()

    async def publish(
        self, engines: InferencePart, trainer: TrainingPart, rollout_id: int | None
    ) -> PublicationReport | None:
        """From the trainer's turn to that of the engines. In the engines' turn they make room first."""
        self._tell()
        try:
            if not self.engines_wait:
                await self._change_places(engines, trainer)
            try:
                return await self._hand_over(engines, trainer, rollout_id)
            except EnginesLostError as error:
                self._note(f"engines are started again, and the weights published after that: {error}")
            await trainer.offload()
            await engines.onload()
            await engines.wait_updatable()
            await self._change_places(engines, trainer)
            return await self._hand_over(engines, trainer, rollout_id)
        finally:
            self._end()

    async def _hand_over(
        self, engines: InferencePart, trainer: TrainingPart, rollout_id: int | None
    ) -> PublicationReport | None:
        await trainer.offload(keep_weights=True)
        await engines.onload_weights()
        publication = await trainer.update_weights(rollout_id)
        await trainer.offload()
        await engines.onload_kv()
        return publication

    async def _change_places(self, engines: InferencePart, trainer: TrainingPart) -> None:
        """From the engines' turn to that of the trainer, whichever engines live."""
        await self.make_room(engines)
        await trainer.onload()

    def _tell(self) -> None:
        if self._pause is None:
            self._pause = self._pauses.begin("the trainer's turn on shared GPUs")

    def _end(self) -> None:
        self.engines_wait = False
        if self._pause is not None:
            self._pause.end()
            self._pause = None


def make_turns(layout: ProcessLayout, config: Config, pauses: Pauses, note: Callable[[str], None]) -> Turns:
    """The form that fits `layout`. `note` shows a line to the person who runs the job."""
    if layout.colocated:
        return ColocatedGpus(pauses, config.engine.colocate_memory_peak_device, note)
    return SeparateGpus()
