"""`package.module:function`: how a configuration names the user's own code.

The current working directory is importable, as it is for `python script.py`. So the user can name a function in a file
beside the recipe without installing anything.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from asyncrl.errors import AsyncRLError


def resolve_dotted_path(path: str, *, setting: str, error: type[AsyncRLError]) -> Callable[..., Any]:
    """Imports and returns the function at `path`, the value of `setting`.

    Raises `error`, which says which step failed, for any defect.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise error(f"{setting}: {path!r} is not of the form package.module:function")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        target: Any = importlib.import_module(module_name)
    except Exception as cause:  # a user's module may raise anything while it is imported
        where = f"module {module_name!r} does not import"
        raise error(
            f"{setting}: {path!r}: {where} ({type(cause).__name__}: {cause}); looked in {os.getcwd()} too"
        ) from cause
    for name in attribute.split("."):
        if not hasattr(target, name):
            close = difflib.get_close_matches(name, dir(target), n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise error(f"{setting}: {path!r}: {module_name!r} has no {attribute!r}{hint}")
        target = getattr(target, name)
    if not callable(target):
        raise error(f"{setting}: {path!r} is not a function but {type(target).__name__}")
    resolved: Callable[..., Any] = target
    return resolved
