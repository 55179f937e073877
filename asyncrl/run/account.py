"""The sums of a run, made of the lines of metrics.jsonl: those of this attempt, and those before a resume. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from asyncrl.observability.run_view import HeldOut


class Account:
    """Takes one line after the other; a step that comes again replaces nothing, so give each step once."""

    def __init__(self) -> None:
        self.rewards: dict[int, float] = {}
        """Mean reward by step."""
        self.evaluations: dict[int, HeldOut] = {}
        """Points of the evaluation by steps trained before it; one that comes again replaces the former."""
        self.phases: dict[str, float] = {}
        """Seconds of the steps by phase."""
        self.trained_tokens: float | None = None
        """None where nothing told."""
        self.largest_logprob_diff: float | None = None
        self.silent_steps = 0
        """Steps in which no group had a signal."""
        self._samples = self._failed = self._groups = self._silent = self._dropped = 0
        self._failures: Counter[str] = Counter()
        """Failed samples by the most common failure of their step."""

    def add(self, step: int, line: Mapping[str, Any], failure: str = "") -> None:
        """Adds the metrics of a step or of an evaluation, by name; `failure` is the most common one of the step."""
        if (accuracy := line.get("eval/accuracy")) is not None:
            self.evaluations[step] = HeldOut(accuracy, line.get("eval/mean_reward"))
        if "rollout/reward_mean" in line:
            self._add_step(step, line, failure)

    def facts(self) -> dict[str, str | int | float | None]:
        """Lines of the summary: what was measured, and what went wrong. What did not happen has no line."""
        facts: dict[str, str | int | float | None] = {}
        if self.trained_tokens is not None:
            facts["tokens trained"] = int(self.trained_tokens)
        if self.largest_logprob_diff is not None:
            facts["largest log-prob difference"] = self.largest_logprob_diff
        reason = f", most often: {self._failures.most_common(1)[0][0]}" if self._failures else ""
        if self._failed:
            facts["failed samples"] = f"{self._failed} of {self._samples}{reason}"
        if self._dropped:
            facts["groups replaced"] = f"{self._dropped}" + ("" if self._failed else reason)
        if self._silent:
            facts["groups without signal"] = f"{self._silent} of {self._groups}, their rewards being all equal"
        return facts

    def _add_step(self, step: int, line: Mapping[str, Any], failure: str) -> None:
        reward = line["rollout/reward_mean"]
        self.rewards[step] = math.nan if reward is None else reward
        for name, seconds in line.items():
            if name.startswith("time/") and name != "time/step_s":
                phase = name.removeprefix("time/").removesuffix("_s")
                self.phases[phase] = self.phases.get(phase, 0.0) + (seconds or 0.0)
        if (tokens := line.get("train/trained_tokens")) is not None:
            self.trained_tokens = (self.trained_tokens or 0.0) + tokens
        if (difference := line.get("train/logprob_diff_max")) is not None:
            self.largest_logprob_diff = max(self.largest_logprob_diff or 0.0, difference)
        failed, groups = int(line["rollout/failed_samples"]), int(line["rollout/groups"])
        self._samples += int(line["rollout/samples"]) + failed
        self._failed += failed
        self._dropped += int(line["rollout/dropped_groups"])
        if failure:
            self._failures[failure] += max(1, failed)
        if (silent := line.get("train/groups_without_signal")) is not None:
            self._groups += groups
            self._silent += int(silent)
            self.silent_steps += int(silent) == groups
