"""From the failures of trainer ranks to the one error of the driver. Which rank is blamed is a pure function."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

import structlog

from asyncrl import errors
from asyncrl.errors import AsyncRLError, TrainerError
from asyncrl.observability.waits import waiting
from asyncrl.training.ranks.rank_link import RankFailure, describe

_log = structlog.get_logger(__name__)


def error_of(failure: RankFailure, what: str) -> AsyncRLError:
    """The driver's error for a failed rank: of the same class where the rank raised an AsyncRLError."""
    kind = getattr(errors, failure.error, None)
    if isinstance(kind, type) and issubclass(kind, AsyncRLError):
        return kind(f"trainer rank {failure.rank}: {failure.message}")
    return TrainerError(f"{failure} (while {what})" if not failure.frames else f"while {what}: {failure}")


def blame(failures: Sequence[RankFailure], local: BaseException | None, what: str) -> tuple[RankFailure, AsyncRLError]:
    """Chooses the failure that caused the others; returns it and the error to raise.

    A rank that died comes first, then an AsyncRLError of rank 0, then the ranks in the order of their reports.

    Args:
        failures: of the other ranks, in the order in which they became known.
        local: the exception of rank 0 itself. Either `failures` is not empty or this is not None.
        what: the command in words.
    """
    if isinstance(local, AsyncRLError) and not any(failure.died for failure in failures):
        return RankFailure(0, type(local).__name__, str(local)), local
    known = list(failures)
    if not known and local is not None:
        known.append(describe(0, local))
    blamed = next((failure for failure in known if failure.died), known[0])
    error = error_of(blamed, what)
    error.__cause__ = local
    return blamed, error


def error_of_hung(stacks: Mapping[int, str | None], what: str, late: str) -> TrainerError:
    """The error for ranks that are `late` with a command, with the stack of each; None: it did not answer."""
    lines = [f"trainer: {what} {late}"]
    lines += [f"rank {rank} is at:\n{stack or '(no answer)'}".rstrip() for rank, stack in stacks.items()]
    return TrainerError("\n".join(lines))


async def tried(
    what: str, step: Callable[[], Awaitable[object]], timeout_s: float, known: BaseException | None = None
) -> None:
    """One step of a disposal: logs its failure or timeout, so that the next step follows.

    `known` is the failure that ends the job. It is told there, and not here too.
    """
    try:
        with waiting(what, "trainer", timeout_s):
            await step()
    except Exception as error:
        if known is not None and str(error) == str(known):
            return
        _log.warning("the trainer did not end in order", step=what, error=f"{type(error).__name__}: {error}")
