"""`eval.function`: evaluation by a function of the user's own, which gets the policy as a Hugging Face directory.

    async def evaluate(hf_dir: Path, **args) -> float | dict[str, float]

Invariants
- What the function raises or returns that is no result is a skipped point with a reason, never the end of the run.
- The directory has config and tokenizer of the model and the weights of the checkpoint, as links. It is there until
  the function has returned.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread

from asyncrl.config.sections.run import EvalConfig
from asyncrl.data.dotted_path import resolve_dotted_path
from asyncrl.data.model_files import as_model
from asyncrl.errors import ConfigError, RolloutError, describe_exception
from asyncrl.observability.waits import waiting


class ExternalEvaluation:
    """The function of `eval.function`, looked up and ready to be called."""

    def __init__(self, config: EvalConfig, model: Path) -> None:
        """`model` is the directory whose config and tokenizer the policy has.

        Raises ConfigError for a function that does not import or does not take `eval.function_args`.
        """
        assert config.function is not None, "asked for by the configuration"
        function = resolve_dotted_path(config.function, setting="eval.function", error=ConfigError)
        try:
            inspect.signature(function).bind(model, **config.function_args)
        except TypeError as error:
            raise ConfigError(
                f"eval.function: {config.function} is called as (hf_dir, **eval.function_args), which it does not "
                f"take: {error}"
            ) from error
        except ValueError:  # a callable written in C tells no signature
            pass
        self._function: Callable[[Path], Any] = partial(function, **config.function_args)
        self._name, self._timeout_s, self._model = config.function, config.timeout_s, model.absolute()

    async def __call__(self, checkpoint: Path) -> dict[str, float]:
        """The numbers by name, `accuracy` among them, for the weights in `checkpoint`.

        Raises RolloutError for whatever goes wrong, TimeoutError after `eval.timeout_s`. A sync function that takes too
        long keeps its thread.
        """
        with (
            as_model(checkpoint, self._model) as directory,
            waiting("evaluation", f"{self._name} of {checkpoint}", self._timeout_s),
        ):
            try:
                return self._judge(await self._call(directory))
            except (Exception, SystemExit) as error:  # whatever the user's function raises is the outcome
                raise RolloutError(f"{self._name}: {describe_exception(error)}") from error

    async def _call(self, directory: Path) -> Any:
        value = await anyio.to_thread.run_sync(self._function, directory, abandon_on_cancel=True)
        return await value if inspect.isawaitable(value) else value

    def _judge(self, value: Any) -> dict[str, float]:
        numbers = value if isinstance(value, Mapping) else {"accuracy": value}
        wrong = {name: number for name, number in numbers.items() if not _is_number(number)}
        if wrong or "accuracy" not in numbers:
            raise ValueError(f"a number or a dict of numbers with `accuracy` is wanted, and it returned {value!r:.200}")
        return {str(name): float(number) for name, number in numbers.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
