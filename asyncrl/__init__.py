"""asyncrl: reinforcement-learning post-training of language models as one asyncio program."""

from __future__ import annotations

import sys
from types import TracebackType

_otherwise = sys.excepthook


def _tell_interrupt(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """One line for a Ctrl-C that came while this package was being imported, which takes a second; see `run_job`."""
    if issubclass(kind, KeyboardInterrupt) and _is_importing(traceback):
        print("stopped by SIGINT", file=sys.stderr, flush=True)
    else:
        _otherwise(kind, error, traceback)


def _is_importing(traceback: TracebackType | None) -> bool:
    """Whether the body of one of our modules was running."""
    while traceback is not None:
        frame, traceback = traceback.tb_frame, traceback.tb_next
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__", "").startswith(f"{__name__}."):
            return True
    return False


sys.excepthook = _tell_interrupt
