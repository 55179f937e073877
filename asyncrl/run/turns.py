"""Turns: who may use the GPUs, where engines share them with the trainer.

There are two forms, and the layout decides between them once, when the job begins. In `Turns` engines and trainer have
GPUs of their own, and nobody waits. In `SharedTurns` they change places:

    whose turn   engines                trainer                        engines              trainer
    what         generate a batch   |   train, save, export weights |  generate a batch  |  train ...
    begins with  publish                trainers_turn                  publish              trainers_turn

Invariants of shared GPUs
- The trainer's turn is a pause of the engines, and executors hear of it. Groups that no batch took wait in the engines.
- Weights are exported while they are on the device, and leave it only then. Other memory of the trainer leaves before
  the weights of the engines come back; the trainer's weights leave before other memory of the engines comes back.
- A publication ends the trainer's turn for the executors, also a publication that fails. Engines that live go on after
  that, with the last copy of published weights where there is one, unless a rank of the trainer failed: then nobody
  can free the GPUs.
- Engines that all ended in the trainer's turn are started again before their publication, once.
- Each step of a change of places may be repeated, so a change may begin wherever an earlier one was cancelled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

from asyncrl.config import Config
from asyncrl.config.layout import ProcessLayout
from asyncrl.errors import ConfigError, EnginesLostError, WeightUpdateError

if TYPE_CHECKING:  # torch stays out of the driver until the engines are on their way
    from asyncrl.run.parts import InferencePart, TrainingPart
    from asyncrl.run.pauses import Pause, Pauses
    from asyncrl.weights.publication import PublicationReport


class Halves(NamedTuple):
    """The two halves of a job that need GPUs."""

    engines: InferencePart
    trainer: TrainingPart


class Turns:
    """Engines and trainer work at the same time; see the module's docstring."""

    engines_wait = False
    """Whether engines generate nothing before the next publication."""

    def check_overlap(self) -> None:
        """Raises ConfigError where engines cannot generate while the trainer trains."""

    async def make_room(self, engines: InferencePart) -> None:
        """Engines give memory up before the trainer is built. Raises EngineError when an engine does not start."""

    async def trainers_turn(self, halves: Halves) -> None:
        """The trainer may compute from now on, until the next publication.

        Raises EngineError for engines that do not give up their memory.
        """

    async def publish(self, halves: Halves, rollout_id: int | None) -> PublicationReport | None:
        """Brings the engines to the trainer's weights after rollout `rollout_id`; after that they may generate.

        Returns None where half a job runs (`debug`) and nothing is published. Raises WeightUpdateError as
        `TrainGroup.update_weights` does.
        """
        return await halves.trainer.update_weights(rollout_id)


class SharedTurns(Turns):
    """Engines give their memory up while the trainer computes."""

    def __init__(self, pauses: Pauses, peak_device: Literal["gpu", "cpu"], note: Callable[[str], None]) -> None:
        """`peak_device`: `engine.colocate_memory_peak_device`. `note` shows a line to the person who runs the job."""
        self._pauses = pauses
        self._peak_device = peak_device
        self._note = note
        self._pause: Pause | None = None
        """The trainer's turn, as the executors hear of it."""

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

    async def trainers_turn(self, halves: Halves) -> None:
        """Engines leave the GPUs, and the trainer comes back to them."""
        self.engines_wait = True
        self._tell()
        await halves.engines.offload()
        await halves.trainer.onload()

    async def publish(self, halves: Halves, rollout_id: int | None) -> PublicationReport | None:
        """From the trainer's turn to that of the engines. In the engines' turn they make room first."""
        engines, trainer = halves
        self._tell()
        try:
            if not self.engines_wait:
                await self._change_places(halves)
            try:
                return await self._hand_over(halves, rollout_id)
            except EnginesLostError as error:
                self._note(f"engines are started again, and the weights published after that: {error}")
            await trainer.offload()
            await engines.onload()
            await engines.wait_updatable()
            await self._change_places(halves)
            return await self._hand_over(halves, rollout_id)
        finally:
            self.engines_wait = False
            if self._pause is not None:
                self._pause.end()
                self._pause = None

    async def _hand_over(self, halves: Halves, rollout_id: int | None) -> PublicationReport | None:
        engines, trainer = halves
        await trainer.offload(keep_weights=True)
        await engines.onload_weights()
        try:
            publication = await trainer.update_weights(rollout_id)
        except EnginesLostError:  # they are started again, in the engines' turn
            raise
        except WeightUpdateError:  # the trainer is whole, and its memory can go
            await self._end_turn(halves)
            raise
        await self._end_turn(halves)
        return publication

    async def _end_turn(self, halves: Halves) -> None:
        await halves.trainer.offload()
        await halves.engines.onload_kv()

    async def _change_places(self, halves: Halves) -> None:
        """From the engines' turn to that of the trainer, whichever engines live."""
        await self.make_room(halves.engines)
        await halves.trainer.onload()

    def _tell(self) -> None:
        if self._pause is None:
            self._pause = self._pauses.begin("the trainer's turn on shared GPUs")


def make_turns(layout: ProcessLayout, config: Config, pauses: Pauses, note: Callable[[str], None]) -> Turns:
    """The form that fits `layout`. `note` shows a line to the person who runs the job."""
    return SharedTurns(pauses, config.engine.colocate_memory_peak_device, note) if layout.colocated else Turns()
