"""A scratch directory of the run for the sockets and temporary files of engines.

An engine that is ended by a signal unlinks nothing, so these files are removed with their directory. (The host removes
files of the process tree in /dev/shm: host/shared_memory.py.)
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from pathlib import Path

_LONGEST_SOCKET_PATH = 107
_SOCKET_NAME = "/tmp12345678"


class Scratch:
    """The directory for temporary files of engines: inside the run directory where the path is short enough.

    Unix sockets are made in it, whose paths have at most 107 characters.
    """

    def __init__(self, run_dir: Path) -> None:
        inside = run_dir.resolve() / "tmp"
        fits = len(str(inside)) + len(_SOCKET_NAME) <= _LONGEST_SOCKET_PATH
        self.path = inside if fits else Path(tempfile.gettempdir()) / f"asyncrl-{secrets.token_hex(4)}"

    def create(self) -> None:
        """Makes the directory anew; files of an attempt that was killed are removed."""
        self.remove()
        self.path.mkdir(mode=0o700, parents=True)

    def remove(self) -> None:
        """Removes the directory with all files in it; does nothing where there is none."""
        shutil.rmtree(self.path, ignore_errors=True)
