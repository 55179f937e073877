"""What engines leave on disk, and how it goes with them: sockets and temporary files.

An engine that is ended by a signal unlinks nothing. Its sockets and temporary files therefore go into the run's own
scratch directory. (What is left in /dev/shm goes with the process tree: host/shared_memory.py.)
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from pathlib import Path

_LONGEST_SOCKET_PATH = 107
_SOCKET_NAME = "/tmp12345678"


class Scratch:
    """The directory that engines use for temporary files: inside the run directory where the path is short enough.

    Unix sockets are made in it, whose paths have at most 107 characters.
    """

    def __init__(self, run_dir: Path) -> None:
        inside = run_dir.resolve() / "tmp"
        fits = len(str(inside)) + len(_SOCKET_NAME) <= _LONGEST_SOCKET_PATH
        self.path = inside if fits else Path(tempfile.gettempdir()) / f"asyncrl-{secrets.token_hex(4)}"

    def create(self) -> None:
        """Makes it anew: what a killed attempt left there is gone."""
        self.remove()
        self.path.mkdir(mode=0o700, parents=True)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
