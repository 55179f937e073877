"""The loops of entrypoints/, which are programs and no package, as modules."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

ENTRYPOINTS = Path(__file__).parents[1] / "entrypoints"


def load_loop(name: str) -> Any:
    """A module of its own at each call: what a test replaces in it, it replaces for itself."""
    spec = importlib.util.spec_from_file_location(name, ENTRYPOINTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
