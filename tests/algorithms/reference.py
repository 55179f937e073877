"""The project's policy gradients once more, in float64 and token by token, as their papers print them.

It shares no code with `asyncrl/algorithms`: autograd differentiates what is written here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FLOOR = 1e-6


@dataclass(frozen=True)
class Response:
    """One sequence: its trained tokens alone."""

    sample: int
    group: int
    places: tuple[int, ...]
    """Where its trained tokens stand in the flat tensors."""


@dataclass(frozen=True)
class Case:
    """A batch as plain lists."""

    responses: Sequence[Response]
    rewards: Sequence[float]
    groups: Sequence[int]
    sampled: Sequence[int]
    """Tokens of the longest response of each sample, trained or not."""
    truncated: Sequence[bool]
    limit: int
    """Most tokens of a response."""


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"clip_low": 0.2, "clip_high": 0.28, "unit": "token"},
    "dr_grpo": {"clip_low": 0.2, "clip_high": 0.2, "unit": "fixed"},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28, "unit": "token", "truncated": 0.0},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "unit": "sequence"},
    "gspo_token": {"clip_low": 3e-4, "clip_high": 4e-4, "unit": "sequence"},
    "cispo": {"ratio_max": 5.0, "unit": "token"},
    "distill": {"clip_low": 0.2, "clip_high": 0.2, "unit": "token", "teacher_weight": 1.0},
    "rloo": {"clip_low": 0.2, "clip_high": 0.2, "unit": "token"},
    "reinforce_pp": {"clip_low": 0.2, "clip_high": 0.2, "unit": "token"},
    "reinforce_pp_baseline": {"clip_low": 0.2, "clip_high": 0.2, "unit": "token"},
}


def advantages(name: str, case: Case, rewards: Sequence[float], *, drops: bool) -> list[float]:
    """Of each sample; `drops`: responses that were cut off are not trained."""
    members = {g: [r for r, h in zip(rewards, case.groups, strict=True) if h == g] for g in set(case.groups)}
    centred = [r - statistics.fmean(members[g]) for r, g in zip(rewards, case.groups, strict=True)]
    if name in ("grpo", "dapo", "gspo", "gspo_token", "cispo"):
        return [
            0.0 if len(set(members[g])) == 1 else c / (statistics.stdev(members[g]) + FLOOR)
            for c, g in zip(centred, case.groups, strict=True)
        ]
    if name == "dr_grpo":
        return centred
    if name == "rloo":
        result = []
        for i, (r, g) in enumerate(zip(rewards, case.groups, strict=True)):
            others = [q for j, (q, h) in enumerate(zip(rewards, case.groups, strict=True)) if h == g and j != i]
            result.append(r - statistics.fmean(others) if others else 0.0)
        return result
    if name == "distill":
        return [0.0] * len(rewards)
    values = centred if name == "reinforce_pp_baseline" else list(rewards)
    per_token = [
        values[response.sample]
        for response in case.responses
        if not (drops and case.truncated[response.sample])
        for _ in response.places
    ]
    if len(set(values)) == 1 or not per_token:
        return [0.0] * len(values)
    mean = statistics.fmean(per_token)
    std = statistics.stdev(per_token) if len(per_token) > 1 else 0.0
    return [(v - mean) / (std + FLOOR) for v in values]


def ratio_of(name: str, at: int, response: Response, logprobs: Tensor, old: Tensor) -> Tensor:
    """The ratio that is clipped, of the token at `at`."""
    if name in ("gspo", "gspo_token"):
        log_ratios = [logprobs[p] - old[p] for p in response.places]
        s = torch.stack(log_ratios).mean().exp()
        return s if name == "gspo" else s.detach() * logprobs[at].exp() / logprobs[at].detach().exp()
    return (logprobs[at] - old[at]).exp()


def weight_of(settings: Mapping[str, Any], at: int, response: Response, old: Tensor, engine: Tensor) -> float:
    """The importance weight of the token at `at`."""
    if settings.get("correction", "off") == "off":
        return 1.0
    level, low, high = settings["level"], settings["lower"], settings["upper"]
    differences = [float(old[p] - engine[p]) for p in response.places]
    exponent = {
        "token": float(old[at] - engine[at]),
        "sequence": math.fsum(differences),
        "geometric": statistics.fmean(differences),
    }[level]
    weight = math.exp(exponent)
    if settings["correction"] == "truncate":
        return min(max(weight, low), high)
    return weight if low <= weight <= high else 0.0


def divergence(estimator: str, logprob: Tensor, reference: Tensor, engine: Tensor) -> Tensor:
    """Of one token."""
    if estimator == "k1":
        return logprob - reference
    if estimator == "k2":
        return 0.5 * (logprob - reference) ** 2
    r = torch.exp(reference - logprob)
    k3 = r - torch.log(r) - 1
    return k3 if estimator == "k3" else torch.exp(logprob - engine) * k3


def loss(
    name: str,
    case: Case,
    given: Mapping[str, Any],
    logprobs: Tensor,
    entropies: Tensor,
    engine: Tensor,
    old: Tensor,
    frozen: Tensor,
) -> Tensor:
    """The loss of one optimizer step on the whole case. Everything float64, by place; `frozen` are the log-probs of
    reference and teacher."""
    settings = {**PRESETS[name], **given}
    rewards = list(case.rewards)
    if buffer := settings.get("overlong", 0):
        for i, length in enumerate(case.sampled):
            over = length - (case.limit - buffer)
            rewards[i] -= min(max(over / buffer, 0.0), 1.0)
    beta, estimator = settings.get("kl_coefficient", 0.001), settings.get("kl_estimator", "k3")
    if settings.get("kl") == "reward":
        for response in case.responses:
            for at in response.places:
                rewards[response.sample] -= beta * float(divergence(estimator, engine[at], frozen[at], engine[at]))
    kept = settings.get("truncated", 1.0)
    of_sample = [
        *advantages(name, case, rewards, drops=kept == 0),
    ]
    compared = old if settings.get("correction", "off") != "off" or settings.get("old") == "trainer" else engine
    by_response: list[list[Tensor]] = []
    groups: list[int] = []
    for response in case.responses:
        if (kept == 0 and case.truncated[response.sample]) or not response.places:
            continue
        losses = []
        for at in response.places:
            a, ratio = of_sample[response.sample], ratio_of(name, at, response, logprobs, compared)
            a += settings.get("teacher_weight", 0.0) * float(frozen[at] - engine[at])
            a *= kept if case.truncated[response.sample] and kept != 0 else 1.0
            if name == "cispo":
                token = -min(float(ratio.detach()), settings["ratio_max"]) * a * logprobs[at]
            else:
                bounded = ratio.clamp(1 - settings["clip_low"], 1 + settings["clip_high"])
                token = -torch.minimum(ratio * a, bounded * a)
                if settings.get("dual_clip") and a < 0:
                    token = torch.minimum(token, torch.tensor(settings["dual_clip"] * abs(a), dtype=torch.float64))
            token = token * weight_of(settings, at, response, compared, engine)
            if settings.get("kl") == "loss":
                token = token + beta * divergence(estimator, logprobs[at], frozen[at], engine[at])
            losses.append(token - settings.get("entropy_bonus", 0.0) * entropies[at])
        by_response.append(losses)
        groups.append(response.group)
    if not by_response:
        return logprobs.sum() * 0.0
    if settings["unit"] == "token":
        return torch.stack([token for losses in by_response for token in losses]).mean()
    if settings["unit"] == "sequence":
        return torch.stack([torch.stack(losses).mean() for losses in by_response]).mean()
    if settings["unit"] == "fixed":
        return torch.stack([torch.stack(losses).sum() / case.limit for losses in by_response]).mean()
    of_group = {group: list[Tensor]() for group in groups}
    for losses, group in zip(by_response, groups, strict=True):
        of_group[group] += losses
    return torch.stack([torch.stack(losses).mean() for losses in of_group.values()]).mean()
