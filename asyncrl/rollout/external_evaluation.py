"""`eval.function`: evaluation by a function of the user's own, which gets the policy as a Hugging Face directory.

    def evaluate(hf_dir: Path, **args) -> float | dict[str, float]        # or async

Invariants
- The function runs in a process of its own: it may load models, take its time and set threads. After `eval.timeout_s`
  the process is killed.
- What the function raises or returns that is no result is a skipped point with a reason, never the end of the run.
- The directory has config and tokenizer of the model and the weights of the checkpoint, as links. It is there until
  the function has returned.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import anyio

from asyncrl.config.sections.run import EvalConfig
from asyncrl.data.model_files import as_model
from asyncrl.errors import ConfigError, RolloutError
from asyncrl.host.process import ProcessSpec
from asyncrl.observability.waits import waiting
from asyncrl.rollout.evaluation_process import REQUEST, RESULT, find_function
from asyncrl.rollout.handover import in_thread
from asyncrl.rollout.rewards.pool import ProcessHost
from asyncrl.served import declared_models

_END_TIMEOUT_S = 30.0


class ExternalEvaluation:
    """The function of `eval.function`, looked up and ready to be called."""

    def __init__(self, config: EvalConfig, model: Path, *, host: ProcessHost | None, log_dir: Path, name: str) -> None:
        """`model` is the directory whose config and tokenizer the policy has. `host` runs the processes, whose names
        begin with `name`.

        Raises ConfigError for a function that does not import or does not take `eval.function_args`.
        """
        assert config.function is not None, "asked for by the configuration"
        find_function(config)
        if host is None:
            raise ConfigError("eval.function runs in a process of its own; give the rollout executor a host")
        self._config, self._name, self._model = config, config.function, model.absolute()
        self._host, self._log_dir = host, log_dir
        self._names = (f"{name}-evaluation-{i}" if name else f"evaluation-{i}" for i in itertools.count())

    async def __call__(self, checkpoint: Path) -> dict[str, float]:
        """The numbers by name, `accuracy` among them, for the weights in `checkpoint`.

        Raises RolloutError for whatever goes wrong in it, TimeoutError after `eval.timeout_s`.
        """
        with tempfile.TemporaryDirectory(prefix="asyncrl-evaluation-") as work, as_model(checkpoint, self._model) as at:
            await in_thread(lambda: self._write_request(Path(work), at))
            log = self._log_dir / "evaluation.log"
            module = "asyncrl.rollout.evaluation_process"
            spec = ProcessSpec(next(self._names), (sys.executable, "-m", module, work), log_path=str(log))
            tail = await self._run(spec, f"{self._name} of {checkpoint}")
            result = await in_thread(lambda: _read(Path(work) / RESULT))
        if result is None:
            raise RolloutError(f"{self._name} ended its process: {tail[-500:]} ({log})")
        if (failure := result.get("failure")) is not None:
            raise RolloutError(f"{self._name}: {failure}")
        return {name: float(number) for name, number in result["numbers"].items()}

    async def _run(self, spec: ProcessSpec, what: str) -> str:
        """Returns the last lines of the process once it has ended."""
        await self._host.spawn(spec)
        ended = False
        try:
            with waiting("evaluation", what, self._config.timeout_s):
                exited = await self._host.wait(spec.name)
                ended = True
                return f"exit code {exited.returncode}: {exited.log_tail.strip()}"
        finally:
            if not ended:
                with anyio.CancelScope(shield=True), waiting("end of an evaluation", spec.name, _END_TIMEOUT_S):
                    await self._host.kill(spec.name)

    def _write_request(self, work: Path, directory: Path) -> None:
        request = {
            "function": self._name,
            "args": self._config.function_args,
            "directory": str(directory),
            "models": declared_models(),
            "cwd": os.getcwd(),
            "import_path": sys.path,
        }
        (work / REQUEST).write_text(json.dumps(request))


def _read(path: Path) -> dict[str, Any] | None:
    return dict(json.loads(path.read_text())) if path.exists() else None
