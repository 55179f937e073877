"""Starts engines and their router as a job does, with a tiny model that is made on the spot, and has them answer."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.demo.model import build
from asyncrl.doctor.finding import Finding, failed, ok

TIMEOUT_S = 900.0
"""The first start on GPUs compiles kernels, which takes minutes; later ones find them in the cache."""
_HEAD_DIM = 64
"""FlashInfer's kernels have none smaller."""
_PROGRAM = (
    "import sys; from pathlib import Path; from asyncrl.evaluate import evaluate_model; "
    "sys.exit(evaluate_model(Path(sys.argv[1]), sys.argv[2:]))"
)
_SETTINGS = (
    *("--data.source", "asyncrl.demo.task:train_prompts", "--data.size", "16"),
    *("--eval.data.source", "asyncrl.demo.task:heldout_prompts", "--eval.data.size", "16"),
    *("--rollout.max_new_tokens", "12", "--run.display", "plain"),
)
_SHOWN_LINES = 12


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended; `code` is None where it was ended at its deadline."""

    code: int | None
    output: str
    seconds: float


Run = Callable[[Sequence[str], float], Ended]
"""Runs a command within a time in seconds."""


def engines_start(run: Run, timeout_s: float = TIMEOUT_S) -> Finding:
    """One evaluation on the tiny model: host, engines, router and reward workers start, answer and end."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-doctor-") as scratch:
        model = Path(scratch) / "model"
        build(model, head_dim=_HEAD_DIM)
        argv = [sys.executable, "-c", _PROGRAM, str(model), *_SETTINGS, "--run.dir", f"{scratch}/run"]
        ended = run(argv, timeout_s)
        if ended.code == 0:
            return ok("engines", f"engine and router started, and answered 16 prompts, in {ended.seconds:.0f} s")
        logs = sorted(Path(scratch).glob("run*/logs/engine-*.log"))
        tails = [f"{log.name}:\n{_tail(log.read_text(errors='replace'))}" for log in logs]
    how = f"no end within {timeout_s:.0f} s" if ended.code is None else f"ended with {ended.code}"
    seen = "\n".join([f"{how}: {_tail(ended.output)}", *tails])
    mend = "mend what failed above first; else the last lines here name the fault; --no-engine leaves this check out"
    return failed("engines", seen, mend)


def run_command(argv: Sequence[str], timeout_s: float) -> Ended:
    """Runs a command. What it started ends with it: engines have a host that sees it go."""
    began = time.monotonic()
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s)
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, output = None, error.stdout or b""
    return Ended(code, output.decode(errors="replace"), time.monotonic() - began)


def _tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-_SHOWN_LINES:])
