"""A scratch directory of the run for the sockets and temporary files of engines; each engine has one of its own in it.

An engine that is ended by a signal unlinks nothing, so these files are removed with their directory: by the engine's
guardian, however the job ends (`ProcessSpec.scratch`), and at the end of the job.
"""

from __future__ import annotations

import itertools
import secrets
import shutil
import tempfile
from pathlib import Path

_LONGEST_SOCKET_PATH = 107
_SOCKET_NAME = "/99999/tmp12345678"


class Scratch:
    """The directory for temporary files of engines: inside the run directory where the path is short enough.

    Unix sockets are made in it, whose paths have at most 107 characters.
    """

    def __init__(self, run_dir: Path) -> None:
        inside = run_dir.resolve() / "tmp"
        fits = len(str(inside)) + len(_SOCKET_NAME) <= _LONGEST_SOCKET_PATH
        self.path = inside if fits else Path(tempfile.gettempdir()) / f"asyncrl-{secrets.token_hex(4)}"
        self._numbers = itertools.count()

    def next(self) -> Path:
        """The directory of another engine, with a short name. It is not made yet."""
        return self.path / str(next(self._numbers))

    def create(self) -> None:
        """Makes the directory anew; files of an attempt that was killed are removed."""
        self.remove()
        self.path.mkdir(mode=0o700, parents=True)

    def remove(self) -> None:
        """Removes the directory with all files in it; does nothing where there is none."""
        shutil.rmtree(self.path, ignore_errors=True)
