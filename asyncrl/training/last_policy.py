"""The policy at the end of a job: where no export and no checkpoint holds it, its newest published weights stay.

They lie in `policy-VERSION`, a Hugging Face directory in the run directory, or in `weights.directory` if that is set.
"""

from __future__ import annotations

from pathlib import Path

import structlog

from asyncrl.config import Config
from asyncrl.observability.events import EventLog, FaultSeen
from asyncrl.observability.waits import waiting
from asyncrl.training.models.model_directory import complete_model
from asyncrl.weights.copies import weights_directory
from asyncrl.weights.publisher import Publisher

_LOOK_TIMEOUT_S = 30.0
_log = structlog.get_logger(__name__)


async def leave_policy(publisher: Publisher, config: Config, events: EventLog, *, trained: int, saved: int) -> None:
    """At the end of a job that has `trained` steps, of which an export or a checkpoint holds the first `saved`.

    Does nothing where all are saved, and where the user wants neither exports nor checkpoints. Tells where the weights
    are, or that they are lost. Raises OSError.
    """
    if trained <= saved or not (config.run.export or config.checkpoint.every):
        return
    left = await _leave(publisher, config, saved)
    none = f"no export and no checkpoint holds the policy of step {trained}"
    if left is None:
        told = f"{none}, nor does a copy of its published weights: what was trained after step {saved} is lost"
    else:
        told = f"{none}; its newest published weights stay in {left}"
    _log.warning(told)
    events.emit(FaultSeen(component="policy", what=told))


async def keep_leftovers(publisher: Publisher, config: Config) -> None:
    """At the start of a job that begins anew: keeps the newest weights that a killed attempt left."""
    try:
        with waiting("look for published weights", "the disk", _LOOK_TIMEOUT_S):
            left = await _leave(publisher, config, saved=0)
    except OSError as error:  # TimeoutError is one
        _log.warning("weights that an earlier attempt left may be written over", error=str(error))
        return
    if left is not None:
        _log.warning(f"the weights that an earlier attempt published last are kept in {left}")


async def _leave(publisher: Publisher, config: Config, saved: int) -> Path | None:
    place = config.run.dir if config.weights.directory is None else weights_directory(config)
    left = await publisher.leave_copy(saved, place)
    if left is not None:
        try:
            complete_model(left, config.model.path)
        except OSError as error:  # they are small, and can be copied later
            _log.warning(f"{left} lacks the config and tokenizer of {config.model.path}", error=str(error))
    return left
