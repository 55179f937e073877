"""What went wrong in trainer ranks, as an error of the driver: whom to blame is a pure function."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

import structlog

from asyncrl import errors
from asyncrl.errors import AsyncRLError, TrainerError
from asyncrl.observability.waits import waiting
from asyncrl.training.ranks.rank_link import RankFailure, describe

_log = structlog.get_logger(__name__)


def error_of(failure: RankFailure, what: str) -> AsyncRLError:
    """A failed rank as the error of the driver: of the same class where it is one of ours."""
    kind = getattr(errors, failure.error, None)
    if isinstance(kind, type) and issubclass(kind, AsyncRLError):
        return kind(f"trainer rank {failure.rank}: {failure.message}")
    return TrainerError(f"{failure} (while {what})" if not failure.frames else f"while {what}: {failure}")


def blame(failures: Sequence[RankFailure], local: BaseException | None, what: str) -> tuple[RankFailure, AsyncRLError]:
    """Which failure is the cause of the others, and the error to raise; `local` is what rank 0 itself raised.

    One of both is there. A rank that died comes first, then what rank 0 has to say, then the ranks in their order.
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


def error_of_hung(stacks: Mapping[int, str | None], what: str, timeout_s: float) -> TrainerError:
    """Ranks that did not end a command, each with where it is; None did not answer."""
    lines = [f"trainer: {what} did not end within {timeout_s:g} s"]
    lines += [f"rank {rank} is at:\n{stack or '(no answer)'}".rstrip() for rank, stack in stacks.items()]
    return TrainerError("\n".join(lines))


async def tried(what: str, step: Callable[[], Awaitable[object]], timeout_s: float) -> None:
    """One step of a disposal: whatever becomes of it, the next one follows."""
    try:
        with waiting(what, "trainer", timeout_s):
            await step()
    except Exception as error:
        _log.warning("the trainer did not end in order", step=what, error=f"{type(error).__name__}: {error}")
