"""The errors that a user can cause and mend.

Every expected failure is an `AsyncRLError`. Its message says what happened, to which thing, and
what to do; the entrypoint prints that message alone (no traceback) and exits with `exit_code`.
Anything else that escapes is a defect of this project and keeps its traceback.
"""

from __future__ import annotations


class AsyncRLError(Exception):
    """An expected failure; the message names the thing and the fix."""

    exit_code = 1


class ConfigError(AsyncRLError):
    """The configuration cannot work: unknown key, bad range, impossible arithmetic."""

    exit_code = 2


class RunDirectoryError(AsyncRLError):
    """The run directory is in use, would be overwritten, or cannot be written."""

    exit_code = 2


class ModelError(AsyncRLError):
    """The model directory is missing, incomplete, or of a kind that cannot be trained."""


class DataError(AsyncRLError):
    """Prompt data is missing, empty, or malformed; the message carries file and line."""


class RewardError(AsyncRLError):
    """A reward function does not import, or fails on too many samples."""


class RolloutError(AsyncRLError):
    """Rollouts cannot be gathered: too many groups failed, or get and commit were called out of order."""


class StalenessError(AsyncRLError):
    """A token was about to train weights further from those that made it than rollout.max_staleness allows."""


class EngineError(AsyncRLError):
    """An inference engine or router failed to start, died, or refused a command."""


class HostLostError(EngineError):
    """The engine host has ended, and with it every process that it had spawned."""


class WeightUpdateError(AsyncRLError):
    """A weight publication could not be completed."""


class EnginesLostError(WeightUpdateError):
    """Every engine that took part in a publication was lost on the way; engines that are started again may take it."""


class ControlError(AsyncRLError):
    """A command did not reach a running job, got no answer, or was refused."""


class TrainerError(AsyncRLError):
    """A trainer rank failed; the message carries the rank and its traceback's last frames."""


class CheckpointError(AsyncRLError):
    """A checkpoint is damaged, incomplete, or was written by another layout or for another model."""


class NonFiniteError(TrainerError):
    """A loss or gradient became NaN or infinite; the batch was saved for inspection."""


class AlgorithmError(AsyncRLError):
    """The algorithm that `train.algorithm` names raised, or returned something that cannot be trained on."""


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
