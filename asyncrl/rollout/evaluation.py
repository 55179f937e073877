"""The report of an evaluation on held-out prompts, and how samples become one. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from asyncrl.data.sample import Sample
from asyncrl.data.staleness import step_of

_MAX_FAILED = 0.5  # fraction of the samples; with more, the point says more about the failure than about the policy


@dataclass(frozen=True, slots=True)
class EvalReport:
    """One point of the evaluation curve, or why there is none."""

    rollout_id: int
    """Steps trained before it."""
    accuracy: float | None
    """Fraction of scored samples whose reward reaches eval.threshold."""
    mean_reward: float | None
    """Mean reward of the scored samples."""
    num_prompts: int
    """Held-out prompts."""
    num_samples: int
    """Samples asked for."""
    failed_samples: int
    """Samples that could not be generated or scored; in no average."""
    truncated_fraction: float | None
    """Fraction of the scored samples that ended by max_new_tokens."""
    response_tokens_mean: float | None
    """Mean length of their responses in tokens."""
    seconds: float
    """Duration of the evaluation."""
    skipped: str | None = None
    """Why there is no result."""
    versions: tuple[str, ...] = ()
    """The weights that were evaluated, oldest first. More than one where new weights came during an evaluation on the
    training engines."""
    others: Mapping[str, float] = field(default_factory=dict)
    """What else `eval.function` has measured, by name."""

    def as_dict(self, prefix: str = "eval/") -> dict[str, float]:
        """Numbers by name, without those that were not measured; empty when skipped."""
        if self.skipped is not None:
            return {}
        numbers = {name: value for name, value in asdict(self).items() if isinstance(value, int | float)}
        del numbers["rollout_id"]
        return {prefix + name: value for name, value in (numbers | dict(self.others)).items()}


def skipped_report(rollout_id: int, reason: str, *, num_prompts: int = 0, seconds: float = 0.0) -> EvalReport:
    """The point of an evaluation without a result."""
    return EvalReport(rollout_id, None, None, num_prompts, 0, 0, None, None, seconds, skipped=reason)


def external_report(rollout_id: int, numbers: Mapping[str, float], *, version: str, seconds: float) -> EvalReport:
    """The point of an evaluation by `eval.function`, which returned `numbers`, `accuracy` among them."""
    others = {name: number for name, number in numbers.items() if name != "accuracy"}
    accuracy = numbers["accuracy"]
    return EvalReport(rollout_id, accuracy, None, 0, 0, 0, None, None, seconds, versions=(version,), others=others)


def report_samples(
    rollout_id: int,
    samples: Sequence[Sample],
    *,
    num_prompts: int,
    threshold: float,
    seconds: float,
    pinned: str | None = None,
) -> EvalReport:
    """The report over `samples`, including failed ones.

    It is a skipped point when more than half of them failed, or when a token was made by other weights than `pinned`
    (None: any weights).
    """
    made_by = sorted({span.version for sample in samples for span in sample.versions}, key=_age)
    if pinned is not None and made_by != [pinned] and made_by:
        reason = f"samples were made by weights {', '.join(made_by)} instead of {pinned}"
        return skipped_report(rollout_id, reason, num_prompts=num_prompts, seconds=seconds)
    scored = [sample for sample in samples if sample.reward is not None]
    failed = len(samples) - len(scored)
    if not scored or failed > _MAX_FAILED * len(samples):
        first = next(sample.failure for sample in samples if sample.failure is not None)
        reason = f"{failed} of {len(samples)} samples failed; the first: {first}"
        return skipped_report(rollout_id, reason, num_prompts=num_prompts, seconds=seconds)
    rewards = [sample.reward for sample in scored if sample.reward is not None]
    return EvalReport(
        rollout_id=rollout_id,
        accuracy=sum(reward >= threshold for reward in rewards) / len(rewards),
        mean_reward=sum(rewards) / len(rewards),
        num_prompts=num_prompts,
        num_samples=len(samples),
        failed_samples=failed,
        truncated_fraction=sum(sample.finish_reason == "length" for sample in scored) / len(scored),
        response_tokens_mean=sum(len(sample.output_ids) for sample in scored) / len(scored),
        seconds=seconds,
        versions=tuple(made_by),
    )


def _age(version: str) -> tuple[int, str]:
    """Sorts versions of one attempt by their step."""
    step = step_of(version)
    return (-1 if step is None else step, version)
