"""Explains every metric as Markdown: `python -m asyncrl.run.metric_reference > docs/metrics.md`.

The explanations stand where the metrics are made: in docstrings of fields, and in `METRICS` beside the code.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Mapping
from dataclasses import fields

from asyncrl.algorithms import kl, off_policy, policy_gradient
from asyncrl.observability.metrics import PHASES
from asyncrl.rollout.evaluation import EvalReport
from asyncrl.rollout.metrics import RolloutMetrics
from asyncrl.run import evaluations
from asyncrl.training.learner import learner
from asyncrl.weights import publication

_INTRODUCTION = """\
# Metrics

Every metric of a run, generated from the code (`python -m asyncrl.run.metric_reference`).

`metrics.jsonl` has one line for each step: `step` (from 1), `attempt` (0 for the first start of the job), `time`
(seconds since the epoch), and the metrics below. An evaluation has a line of its own, whose `step` is the number of
steps trained before it. A metric that was not measured is absent; one that is NaN or infinite is null, and `nonfinite`
has it as text. Trackers (`track.to`) get the same names. `asyncrl samples RUN` shows what the rewards were given for.

What to look at first: `rollout/reward_mean` (does it learn?), `rollout/zero_variance_groups` and `train/advantage_std`
(is there anything to learn from?), `train/entropy` (does it collapse?), `train/grad_norm`, `train/logprob_diff_mean`
(do engine and trainer compute the same?), `rollout/truncated_fraction`, and of time `time/wait_s`.
"""


_NO_METRICS = frozenset({"rollout_id", "failure", "reward_parts", "skipped", "versions", "others"})
"""Fields that are no numbers of their own."""


def reference() -> str:
    """The text of docs/metrics.md."""
    sections = {
        "rollout": "The batch of the step, as it was delivered.",
        "train": (
            "Training on that batch. Figures of the loss are those of policy gradients; an algorithm of your own adds "
            "its own."
        ),
        "weights": "The publication after the step; absent where none was due.",
        "time": "Wall time of the step by phase. The phases do not overlap, and add up to `time/step_s`.",
        "eval": "An evaluation on held-out prompts; eval.function may add names of its own.",
    }
    known = explanations()
    lines = [_INTRODUCTION]
    for section, what in sections.items():
        rows = [_row(name, text) for name, text in known.items() if name.startswith(f"{section}/")]
        lines += [f"\n## {section}\n\n{what}\n\n| metric | what it is |\n|---|---|", *rows]
    return "\n".join(lines) + "\n"


def _row(name: str, text: str) -> str:
    return f"| `{name}` | " + text.replace("|", "\\|") + " |"


def explanations() -> dict[str, str]:
    """What each metric is, by name. A name in angle brackets stands for any: `rollout/reward/<part>_mean`."""
    rollout, evaluation = field_docstrings(RolloutMetrics), field_docstrings(EvalReport)
    phases = {f"time/{name}_s": f"Seconds of phase {name}: {what}." for name, what in PHASES.items()}
    return {
        **{f"rollout/{name}": text for name, text in rollout.items() if name not in _NO_METRICS},
        "rollout/reward/<part>_mean": rollout["reward_parts"],
        **learner.METRICS,
        **policy_gradient.METRICS,
        **kl.METRICS,
        **off_policy.METRICS,
        **publication.METRICS,
        "time/step_s": "Seconds of the whole step, from the end of the step before.",
        **phases,
        **{f"eval/{name}": text for name, text in evaluation.items() if name not in _NO_METRICS},
        **evaluations.METRICS,
    }


def unexplained(metrics: Mapping[str, object]) -> set[str]:
    """The names among `metrics` that have no explanation."""
    patterns = [re.compile("[^/]+".join(map(re.escape, re.split("<[^>]+>", name)))) for name in explanations()]
    return {name for name in metrics if not any(pattern.fullmatch(name) for pattern in patterns)}


def field_docstrings(cls: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, as one line. Raises ValueError for a field without one."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    name = None
    for node in definition.body:
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))) if name is not None:
                found[name] = " ".join(text.split())
        name = node.target.id if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else None
    if missing := [field.name for field in fields(cls) if field.name not in found]:
        raise ValueError(f"{cls.__name__}: no docstring under {', '.join(missing)}")
    return found


if __name__ == "__main__":
    print(reference(), end="")
