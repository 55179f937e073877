"""Errors that a user can cause and fix.

Every expected failure is an `AsyncRLError`. Its message says what happened, to which thing, and what to do. The
entrypoint prints the message without a traceback and exits with `exit_code`. Any other error that reaches the
entrypoint is a defect of this project and keeps its traceback.
"""

from __future__ import annotations


class AsyncRLError(Exception):
    """An expected failure; the message names the thing and the fix."""

    exit_code = 1
    """Exit status of the process."""


class ConfigError(AsyncRLError):
    """The configuration cannot work: an unknown key, a value out of range, numbers that contradict each other."""

    exit_code = 2


class RunDirectoryError(AsyncRLError):
    """The run directory is in use, would be overwritten, or cannot be written."""

    exit_code = 2


class ModelError(AsyncRLError):
    """The model directory is missing, incomplete, or of a kind that cannot be trained."""


class DataError(AsyncRLError):
    """Prompt data or saved rollouts are missing, empty, or malformed; the message names the file and line."""


class RewardError(AsyncRLError):
    """A reward function cannot be imported, or fails on too many samples."""


class RolloutError(AsyncRLError):
    """The executor cannot deliver a batch: too many groups failed, or the loop called get and commit out of order."""


class StalenessError(AsyncRLError):
    """A token is staler than `rollout.max_staleness` allows, so it must not train."""


class EngineError(AsyncRLError):
    """An inference engine or a router failed to start, died, or refused a command."""


class HostLostError(EngineError):
    """The engine host has ended, and with it every process that it spawned."""


class ServedModelError(AsyncRLError):
    """A model of `[models.NAME]` is not served, refuses a question, or does not answer it in time."""


class WeightUpdateError(AsyncRLError):
    """A publication of weights failed."""


class EnginesLostError(WeightUpdateError):
    """Every engine that took part in a publication was lost during it; restarted engines may take the weights."""


class ControlError(AsyncRLError):
    """A command did not reach a running job, got no answer, or was refused."""


class TrainerError(AsyncRLError):
    """A trainer rank failed; the message has the rank and the last frames of its traceback."""


class CheckpointError(AsyncRLError):
    """A checkpoint is damaged, incomplete, or belongs to another layout or another model."""


class ExportError(AsyncRLError):
    """The policy could not be written as a Hugging Face directory; the trainer goes on."""


class NonFiniteError(TrainerError):
    """A loss or gradient became NaN or infinite, or weights diverged; the batch was saved for inspection."""


class AlgorithmError(AsyncRLError):
    """The algorithm that `train.algorithm` names raised, or returned something that cannot be trained on."""


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 engine`, `2 engines`; `plural` for a noun that takes no s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def describe_exception(error: BaseException) -> str:
    """One line: kind, message, and the place in the user's code. Raises nothing, whatever `error` is made of."""
    place = ""
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        place = f" ({code.co_filename}:{traceback.tb_lineno} in {code.co_name})"
        traceback = traceback.tb_next
    try:
        message = str(error)
    except Exception as second:
        message = f"no message, for its __str__ raised {type(second).__name__}"
    return f"{type(error).__name__}: {message}{place}"[:500]
