"""The run itself: its directory, evaluation, and what is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from asyncrl.config.sections.base import Section
from asyncrl.config.sections.data import DataConfig
from asyncrl.config.sections.inference import EvalFleetConfig


class RunConfig(Section):
    """Where a run writes, how it shows itself and how it ends."""

    dir: Path = Path("runs/run")
    """Run directory: config, metrics.jsonl, events.jsonl, samples.jsonl, logs/, export/, summary.json."""

    if_exists: Literal["error", "new", "overwrite", "resume"] = "error"
    """When the directory already holds a run: refuse, take the next free name (run-2, run-3, ...), erase the old
    run as soon as the new one has trained a step, or resume it: go on from its newest checkpoint (`checkpoint.resume`),
    or from the start if it has none. A run that ended before its first step and left only logs is always replaced."""

    export: bool = True
    """Write a Hugging Face export of the final policy into the run directory."""

    host: str = "127.0.0.1"
    """Address that every server of the job binds to. The job's other processes reach it there."""

    display: Literal["auto", "live", "plain"] = "auto"
    """Live table on a terminal, plain lines elsewhere."""

    stop_grace_s: float = Field(default=12.0, gt=0)
    """Longest time to end after SIGINT or SIGTERM before everything is killed. Up to half of it is for a checkpoint of
    the steps since the last one (if `checkpoint.every` is set), the rest for ending all processes."""

    @property
    def checkpoint_grace_s(self) -> float:
        """The part of `stop_grace_s` in which a checkpoint may be written; the rest is for ending all processes."""
        return self.stop_grace_s / 2

    @field_validator("host")
    @classmethod
    def _no_name(cls, host: str) -> str:
        """`localhost` as an address: server and client could choose different ones of those that a name stands for."""
        return "127.0.0.1" if host == "localhost" else host


class EvalConfig(Section):
    """Greedy evaluation on held-out prompts, or by a function of your own. The engines that train evaluate while the
    loop waits. Engines of `eval.fleet` and `eval.function` evaluate beside the loop."""

    every: int | None = Field(default=None, ge=1)
    """Evaluate before every n-th step; none: only at start and end."""

    at_start: bool = True
    """Evaluate before the first step."""

    at_end: bool = True
    """Evaluate after the last step."""

    data: DataConfig | None = None
    """Held-out prompts; none: no evaluation, unless there is `eval.function`."""

    fleet: EvalFleetConfig | None = None

    function: str | None = None
    """Dotted path package.module:function, sync or async, that evaluates in the place of `eval.data`. It is called with
    the Hugging Face directory of the published policy, in a process of its own, and returns the accuracy, or a dict of
    numbers with `accuracy` among them."""

    function_args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of eval.function."""

    if_busy: Literal["wait", "skip"] = "wait"
    """What an evaluation beside the loop does while the one before it still runs: the loop waits for the end of that
    one, or the new point is skipped with this reason. The last one always waits."""

    max_new_tokens: int | None = Field(default=None, ge=1)
    """Longest response in tokens; none: rollout.max_new_tokens."""

    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy."""

    samples_per_prompt: int = Field(default=1, ge=1)
    """Samples per held-out prompt."""

    threshold: float = 1.0
    """A sample counts as correct when its reward is at least this; accuracy is the mean of that."""

    timeout_s: float = Field(default=600.0, gt=0)
    """Longest evaluation; a longer one is a skipped point with a reason."""

    @property
    def enabled(self) -> bool:
        """Whether there is something to evaluate."""
        return self.data is not None or self.function is not None

    @property
    def beside(self) -> bool:
        """Whether evaluations go on beside the loop, on a checkpoint of their own."""
        return self.fleet is not None or self.function is not None

    def due(self, step: int, first_step: int) -> bool:
        """Whether to evaluate after `step` trained steps, before the next one; the attempt began at
        `first_step`."""
        if not self.enabled:
            return False
        return self.at_start if step == first_step else self.every is not None and step % self.every == 0
