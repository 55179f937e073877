"""Settings of the algorithms that come with the project."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from asyncrl.config.sections.base import Section

REFERENCE = "reference"
"""The role of a model that the policy is held close to."""
TEACHER = "teacher"
"""The role of a model that the policy learns from."""


class AlgorithmConfig(Section):
    """Settings of the project's algorithms; none is the algorithm's own value (docs/algorithms.md). One that the chosen
    algorithm does not have is refused."""

    aggregation: Literal["token", "sequence", "fixed", "group"] | None = None
    """How the losses of tokens add up: the mean over tokens; over sequences of their means; sums of sequences over
    rollout.max_new_tokens; or the mean over prompt groups of theirs."""

    clip_low: float | None = Field(default=None, gt=0, lt=1)
    """Ratio is clipped below at 1 - clip_low."""

    clip_high: float | None = Field(default=None, gt=0)
    """Ratio is clipped above at 1 + clip_high."""

    dual_clip: float | None = Field(default=None, gt=1)
    """Bounds the loss of a token with a negative advantage to this times the advantage; none does not."""

    ratio_max: float | None = Field(default=None, gt=0)
    """Largest weight of a token (cispo)."""

    normalize_advantages: bool | None = None
    """Divide group-relative advantages by the group's standard deviation (GRPO); false is Dr. GRPO."""

    entropy_bonus: float | None = Field(default=None, ge=0)
    """The loss of a token falls by this times the entropy of the distribution that it was drawn from."""

    truncated_weight: float | None = Field(default=None, ge=0, le=1)
    """Advantages of responses that were cut off are multiplied by it; at 0 they are not trained."""

    overlong_tokens: int | None = Field(default=None, ge=0)
    """Tokens before rollout.max_new_tokens over which the reward of a response falls linearly; 0: none."""

    overlong_penalty: float | None = Field(default=None, ge=0)
    """By how much it has fallen at rollout.max_new_tokens."""

    old_logprobs: Literal["engine", "trainer"] | None = None
    """The policy that ratios compare with: as the engine told its log-probs, or as the trainer computes them before the
    step (one more forward pass). With a correction it is the trainer."""

    correction: Literal["off", "auto", "truncate", "mask"] = "off"
    """Importance weights for tokens of another policy than the trainer's before the step: bounded, or 0 outside of the
    bounds; auto bounds them from the step on after one whose train/mismatch_k3 is over 0.01."""

    correction_level: Literal["token", "sequence", "geometric"] = "token"
    """Of each token; the product over its sequence; or the geometric mean over it."""

    correction_upper: float = Field(default=2.0, gt=0)
    """Upper bound of a weight."""

    correction_lower: float = Field(default=0.0, ge=0)
    """Lower bound of a weight."""

    kl: Literal["off", "loss", "reward"] | None = None
    """Holds the policy close to a reference: a term of each token's loss, or taken off the reward of a sample."""

    kl_coefficient: float | None = Field(default=None, ge=0)
    """What the KL divergence is multiplied by (0.001)."""

    kl_estimator: Literal["k1", "k2", "k3", "unbiased"] | None = None
    """How it is estimated (k3); docs/algorithms.md."""

    reference: Path | None = None
    """Model of the reference; none is the policy before the first step, after a warm-up."""

    reference_interval: int | None = Field(default=None, ge=1)
    """Steps after which the reference becomes the policy of that time, again and again; none: it stays."""

    teacher: Path | None = None
    """Model of the teacher, with the vocabulary of the trained one."""

    teacher_weight: float | None = Field(default=None, ge=0)
    """Weight of the teacher's log-prob less the engine's in the advantage of a token (distill: 1, others: 0)."""

    advantage_function: str | None = None
    """Your own function in the place of the algorithm's advantages, `package.module:function`: of the rewards, float32
    [samples], and the batch; it gives a tensor of one number for each sample, or for each token."""

    loss_function: str | None = None
    """Your own function in the place of the algorithm's loss: of the tokens of a micro-batch (`TokenInputs`); it gives
    a tensor of one number with gradient for each."""

    def changed(self) -> frozenset[str]:
        """Names of the settings that are not at their default. What a dry run has printed names every setting."""
        return frozenset(
            name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default
        )

    def given(self) -> dict[str, Any]:
        """The settings of the loss that are given, by name; those of the correction not among them."""
        elsewhere = ("reference", "reference_interval", "teacher", "advantage_function", "loss_function")
        return {n: v for n, v in self if v is not None and not n.startswith("correction") and n not in elsewhere}
