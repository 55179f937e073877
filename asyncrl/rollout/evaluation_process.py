"""The process in which `eval.function` runs: `python -m asyncrl.rollout.evaluation_process DIR`.

DIR holds the request (`external_evaluation.py` writes it) and gets the result. There is no torch here unless the
function brings it.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio

from asyncrl.config.sections.run import EvalConfig
from asyncrl.data.dotted_path import resolve_dotted_path
from asyncrl.errors import ConfigError, describe_exception
from asyncrl.served import declare_models

REQUEST, RESULT = "request.json", "result.json"


def find_function(config: EvalConfig) -> None:
    """Imports the function of `eval.function`.

    Raises ConfigError where it does not import, or does not take `eval.function_args`.
    """
    assert config.function is not None, "asked for by the configuration"
    function = resolve_dotted_path(config.function, setting="eval.function", error=ConfigError)
    try:
        inspect.signature(function).bind(Path(), **config.function_args)
    except TypeError as error:
        raise ConfigError(
            f"eval.function: {config.function} is called as (hf_dir, **eval.function_args), which it does not take: "
            f"{error}"
        ) from error
    except ValueError:  # a callable written in C tells no signature
        pass


def main(work: str) -> None:
    """Calls the function as the request in `work` says, and leaves its result there."""
    request = json.loads((Path(work) / REQUEST).read_text())
    os.chdir(request["cwd"])
    sys.path.extend(path for path in request["import_path"] if path not in sys.path)
    declare_models(request["models"])
    result: dict[str, Any]
    try:
        function = resolve_dotted_path(request["function"], setting="eval.function", error=ConfigError)
        value = function(Path(request["directory"]), **request["args"])
        result = {"numbers": judge(anyio.run(_awaited, value) if inspect.isawaitable(value) else value)}
    except (Exception, SystemExit) as error:  # whatever the user's function raises is the outcome
        result = {"failure": describe_exception(error)}
    whole = Path(work) / f"{RESULT}.part"
    whole.write_text(json.dumps(result))
    whole.rename(Path(work) / RESULT)


def judge(value: Any) -> dict[str, float]:
    """The numbers by name. Raises ValueError for what is no number and no dict of numbers with `accuracy`."""
    numbers = value if isinstance(value, Mapping) else {"accuracy": value}
    wrong = {name: number for name, number in numbers.items() if not _is_number(number)}
    if wrong or "accuracy" not in numbers:
        raise ValueError(f"a number or a dict of numbers with `accuracy` is wanted, and it returned {value!r:.200}")
    return {str(name): float(number) for name, number in numbers.items()}


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, bool | str) and math.isfinite(value)
    except TypeError:
        return False


async def _awaited(value: Any) -> Any:
    return await value


if __name__ == "__main__":
    main(sys.argv[1])
