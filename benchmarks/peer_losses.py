"""Losses and gradients of TRL and verl for the same inputs: what tests/algorithms/test_peers.py compares ours with.

    python benchmarks/peer_losses.py

They do not install beside the engine. So this makes an environment of its own, which takes torch and transformers from
the present one and gets the packages of PINNED without their dependencies; it runs itself there, and writes
tests/algorithms/peers.json: for each case the inputs, our settings, and the peer's loss and gradient.

TRL's loss takes advantages that its trainer has made in the same pass as it samples; verl's functions make them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

WRITTEN = Path(__file__).parents[1] / "tests" / "algorithms" / "peers.json"
PINNED = ("trl==1.16.0", "verl==0.9.0", "ray", "msgpack", "tensordict", "pyvers", "omegaconf", "codetiming")
LENGTHS = (5, 2, 6, 3, 4, 6)
GROUPS = (0, 0, 0, 0, 1, 1)
REWARDS = (1.0, 0.0, 0.25, 1.0, 0.5, -0.5)
LIMIT = 6
WIDE = 1e9
"""A bound that never binds."""


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        venv.create(directory, with_pip=True)
        python = Path(directory) / "bin" / "python"
        own = subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True,
            capture_output=True,
            text=True,
        )
        (Path(own.stdout.strip()) / "zz_present.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *PINNED], check=True)
        made = subprocess.run([python, __file__, "--inside"], check=True, stdout=subprocess.PIPE, text=True)
    cases = json.loads(made.stdout.splitlines()[-1])
    lines = ",\n".join(json.dumps(case) for case in cases)
    WRITTEN.write_text(f'{{"packages": {json.dumps(PINNED[:2])}, "cases": [\n{lines}\n]}}\n')
    print(f"{len(cases)} cases in {WRITTEN}")


def inputs(seed: int) -> dict[str, Tensor]:
    """float64 [samples, LIMIT] each; the mask leaves out padding, and a token in the midst of the first sample."""
    generator = torch.Generator().manual_seed(seed)

    def moved() -> Tensor:
        drawn = 0.4 * torch.randn(len(LENGTHS), LIMIT, generator=generator, dtype=torch.float64)
        return drawn.mul(256).round() / 256  # exact in float32, and short as text

    old = -2.0 + moved()
    mask = torch.arange(LIMIT)[None] < torch.tensor(LENGTHS)[:, None]
    mask[0, 2] = False
    return {"logprobs": old + moved(), "old": old, "reference": old + moved(), "mask": mask.double()}


def advantages(estimator: str, mask: Tensor) -> Tensor:
    """[samples, LIMIT], by verl."""
    import numpy as np
    from verl.trainer.ppo import core_algos

    rewards = torch.zeros_like(mask)
    rewards[torch.arange(len(REWARDS)), torch.tensor(LENGTHS) - 1] = torch.tensor(REWARDS, dtype=torch.float64)
    options: dict[str, Any] = {"response_mask": mask, "index": np.array(GROUPS)}
    if estimator == "dr_grpo":
        estimator, options["norm_adv_by_std_in_grpo"] = "grpo", False
    if estimator == "reinforce_plus_plus":
        options = {"response_mask": mask, "config": SimpleNamespace(gamma=1.0)}
    made, _ = core_algos.get_adv_estimator_fn(estimator)(token_level_rewards=rewards, **options)
    return made


def by_trl(given: Mapping[str, Tensor], logprobs: Tensor, advantage: Tensor, options: Mapping[str, Any]) -> Tensor:
    """The loss that TRL's trainer computes in training, on one process and without accumulation."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    mask = given["mask"]
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda value: value, reduce=lambda value, reduction: value, sync_gradients=True
    )
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=options.get("level", "token"),
        beta=options.get("beta", 0.0),
        args=SimpleNamespace(
            use_bias_correction_kl=options.get("bias_correction", False),
            delta=options.get("delta"),
            steps_per_generation=1,
        ),
        loss_type=options["loss_type"],
        epsilon_low=options.get("low", 0.2),
        epsilon_high=options.get("high", 0.28),
        use_vllm=False,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=LIMIT,
        accelerator=accelerator,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    batch = {
        **{"prompt_ids": torch.zeros(len(mask), 1), "prompt_mask": torch.ones(len(mask), 1)},
        **{"completion_ids": torch.zeros_like(mask), "completion_mask": mask, "old_per_token_logps": given["old"]},
        **{"advantages": advantage, "ref_per_token_logps": given["reference"], "num_items_in_batch": mask.sum()},
    }
    loss: Tensor = GRPOTrainer._compute_loss(trainer, trainer.model, batch)
    return loss


def by_verl(given: Mapping[str, Tensor], logprobs: Tensor, advantage: Tensor, options: Mapping[str, Any]) -> Tensor:
    """The loss that verl's registered function computes."""
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig

    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=options.get("low", 0.2),
        clip_ratio_high=options.get("high", 0.2),
        clip_ratio_c=options.get("c", WIDE),
    )
    mask = given["mask"]
    name, unit = options.get("loss", "vanilla"), options.get("unit", "token-mean")
    loss, _ = core_algos.get_policy_loss_fn(name)(given["old"], logprobs, advantage, mask, unit, config)
    if "kl" in options:
        penalty = core_algos.kl_penalty(logprobs, given["reference"], options["kl"])
        loss = loss + 0.5 * core_algos.agg_loss(penalty, mask, unit)
    made: Tensor = loss
    return made


Peer = Callable[[Mapping[str, Tensor], Tensor, Tensor, Mapping[str, Any]], Tensor]
_KL = {"kl": "loss", "kl_coefficient": 0.5}
CASES: tuple[tuple[str, Peer, str, Mapping[str, Any], str, Mapping[str, Any]], ...] = (
    # name, peer, its advantages, its options, our algorithm, our settings
    ("TRL grpo", by_trl, "grpo", {"loss_type": "grpo"}, "grpo", {"aggregation": "sequence"}),
    ("TRL dapo", by_trl, "grpo", {"loss_type": "dapo"}, "dapo", {}),
    ("TRL dr_grpo", by_trl, "dr_grpo", {"loss_type": "dr_grpo", "high": 0.2}, "dr_grpo", {}),
    (
        "TRL gspo",
        by_trl,
        "grpo",
        {"loss_type": "grpo", "level": "sequence", "low": 3e-4, "high": 4e-4},
        "gspo",
        {},
    ),
    ("TRL cispo", by_trl, "grpo", {"loss_type": "cispo", "high": 5.0}, "cispo", {}),
    ("TRL cispo, bound", by_trl, "grpo", {"loss_type": "cispo", "high": 1.1}, "cispo", {"ratio_max": 1.1}),
    ("TRL beta", by_trl, "grpo", {"loss_type": "dapo", "beta": 0.5}, "grpo", {**_KL, "kl_estimator": "k3"}),
    (
        "TRL beta, corrected",
        by_trl,
        "grpo",
        {"loss_type": "dapo", "beta": 0.5, "bias_correction": True},
        "grpo",
        {**_KL, "kl_estimator": "unbiased"},
    ),
    ("TRL delta", by_trl, "grpo", {"loss_type": "dapo", "delta": 1.4}, "grpo", {"dual_clip": 1.4}),
    ("verl grpo", by_verl, "grpo", {"high": 0.28}, "grpo", {}),
    ("verl dr_grpo", by_verl, "dr_grpo", {"unit": "seq-mean-token-sum-norm"}, "dr_grpo", {}),
    ("verl rloo", by_verl, "rloo", {}, "rloo", {}),
    ("verl reinforce++", by_verl, "reinforce_plus_plus", {}, "reinforce_pp", {}),
    ("verl reinforce++-baseline", by_verl, "reinforce_plus_plus_baseline", {}, "reinforce_pp_baseline", {}),
    ("verl dual clip", by_verl, "rloo", {"c": 1.4}, "rloo", {"dual_clip": 1.4}),
    ("verl sequence mean", by_verl, "rloo", {"unit": "seq-mean-token-mean"}, "rloo", {"aggregation": "sequence"}),
    ("verl gspo", by_verl, "grpo", {"loss": "gspo", "low": 3e-4, "high": 4e-4}, "gspo_token", {}),
    ("verl cispo", by_verl, "grpo", {"loss": "cispo", "low": 1.0, "high": 4.0}, "cispo", {}),
    *(
        (f"verl {kind}", by_verl, "rloo", {"kl": kind}, "rloo", {**_KL, "kl_estimator": kind})
        for kind in ("k1", "k2", "k3")
    ),
)


def cases() -> Iterator[dict[str, Any]]:
    """Each case, computed."""
    for seed, (name, peer, estimator, options, algorithm, settings) in enumerate(CASES):
        given = inputs(seed)
        logprobs = given["logprobs"].clone().requires_grad_()
        loss = peer(given, logprobs, advantages(estimator, given["mask"]), options)
        loss.backward()  # type: ignore[no-untyped-call]
        assert logprobs.grad is not None
        yield {
            "name": name,
            "algorithm": algorithm,
            "settings": settings,
            "lengths": LENGTHS,
            "groups": GROUPS,
            "rewards": REWARDS,
            **{key: value.tolist() for key, value in given.items()},
            "loss": loss.item(),
            "gradient": [[float(f"{value:.9g}") for value in row] for row in logprobs.grad.tolist()],
        }


if __name__ == "__main__":
    if sys.argv[1:] == ["--inside"]:
        print(json.dumps(list(cases())))
    else:
        main()
