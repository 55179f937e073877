"""Names of the files in a run directory by which the program knows whose it is."""

from __future__ import annotations

MARKER = ".asyncrl-run.json"
"""File by which a directory is known as ours; it tells the attempt that had the directory last."""
LOCK = ".lock"
"""File that carries the lock, and tells the process that holds it."""
CONTROL = "control.sock"
"""Socket on which the running job takes commands."""
FORMER = ".former"
"""Folder of the run that the one in the directory is to overwrite."""
MOVING = ".former.moving"
"""The same while its files are moved there, or back."""
ERASED = ".erased"
"""Begins the names of folders that are being erased."""
FAILED = "failed-start"
"""Folder of what a run wrote that was to overwrite another one, and ended before its first step."""
