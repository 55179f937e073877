"""The job's key for the control routes of its engines and routers, in a file that nobody but the user can read.

Any local user reaches a server on loopback. Without the key an engine generates and says what it is, and refuses
whatever would change it: weights, pauses, aborts, and the routes that unpickle what they are sent. A router passes
requests on, and shows and changes no worker. The key is in no command line, no environment and no log.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

_FILE = "engines.yaml"
_ARGUMENT = "admin-api-key: "


def key_file(run_dir: Path) -> Path:
    """The file, which SGLang reads as its `--config`."""
    return run_dir / _FILE


def make_key(run_dir: Path) -> str:
    """Writes a new key; an older one is void with the engines that had it."""
    key, path = secrets.token_hex(16), key_file(run_dir)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{_ARGUMENT}{key}\n")
    return key


def read_key(path: Path) -> str | None:
    """The key in the file; None where there is none."""
    try:
        text = path.read_text()
    except OSError:
        return None
    return text.removeprefix(_ARGUMENT).strip() if text.startswith(_ARGUMENT) else None


def key_headers(key: str | None) -> Mapping[str, str]:
    """What a control call sends along."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}
