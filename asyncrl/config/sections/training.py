"""The optimizer step: loss, schedule, layout."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from asyncrl.config.sections.base import Section

DEFAULT_TOKENS = 8192
"""Packing budget where nothing says how much memory there is."""

COLLECTIVE_MARGIN_S = 60.0
"""Collectives time out so much later than a command, so that the driver names the rank that hangs before the
collectives of the others fail."""


class TrainConfig(Section):
    """One step of training."""

    num_steps: int | None = Field(default=100, ge=0)
    """Rollout batches to train; none trains `num_epochs` of the data."""

    num_epochs: int = Field(default=1, ge=1)
    """Passes over the data when num_steps is none."""

    backend: Literal["megatron"] = "megatron"
    """What computes the model and its gradients."""

    algorithm: str = "grpo"
    """grpo, dr_grpo, dapo, rloo, reinforce_pp, reinforce_pp_baseline, gspo, gspo_token, cispo, distill
    (docs/algorithms.md); sft: cross entropy on the responses; or a class of your own, `package.module:Name`
    (asyncrl/algorithms/algorithm.py says how to write one)."""

    algorithm_args: dict[str, Any] = Field(default_factory=dict)
    """What the constructor of an algorithm of your own is given; those of the project have the section algorithm."""

    lr: float = Field(default=1e-5, ge=0)
    """Peak learning rate."""

    lr_warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly from 0."""

    lr_decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up, down to 0 at the end of the last step."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of Adam."""

    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of Adam's first moment."""

    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of Adam's second moment."""

    adam_eps: float = Field(default=1e-8, gt=0)
    """Added to Adam's denominator."""

    grad_clip: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0 does not clip."""

    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per pass over a rollout batch; prompt groups are split among them whole."""

    batch_epochs: int = Field(default=1, ge=1)
    """Passes over each rollout batch, each of train.minibatches optimizer steps (num_epochs are passes over the
    data)."""

    update_weights_interval: int = Field(default=1, ge=1)
    """Rollout batches from one publication of the weights to the next, in train_async.py; train.py publishes each."""

    max_tokens_per_microbatch: int | None = Field(default=None, ge=1)
    """Packing budget of one forward pass, in tokens, per rank. none: 8192 on CPU. On GPUs what the estimate of
    --dry-run finds room for: at most 32768, and at least the longest sequence, which is model.context_length where that
    is set; 8192 where the model is not there yet (model.builder)."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A NaN or infinite loss or gradient stops the run (batch saved), or skips that optimizer step. Weights that
    diverge (100 times as large as before training, or not finite) always stop it, neither published nor saved."""

    tensor_parallel: int = Field(default=1, ge=1)
    """Ranks that share one copy of the model; the other ranks are data parallel."""

    recompute: Literal["none", "mlp", "full"] = "none"
    """What the backward pass computes again instead of keeping it: nothing, the feed-forward network of each layer, or
    each whole layer. Less memory for activations, more time; losses and gradients do not change."""

    optimizer_on_host: bool = False
    """Adam's moments, and the weights in the precision of their updates, lie in host memory and are updated there: on a
    GPU in bfloat16. Of 18 bytes a parameter 6 stay on the GPUs; the host holds 16. Slower: one thread updates about a
    billion parameters a second (OMP_NUM_THREADS)."""

    seed: int = 1234
    """Seed of the trainer."""

    init_timeout_s: float = Field(default=600.0, gt=0)
    """Longest time until all ranks have met, and from then on until each has built its model. Ranks that have not come
    are named after 15 s, and at the end."""

    step_timeout_s: float = Field(default=1800.0, gt=0)
    """Longest time of one trainer command; a rank that hangs is named."""

    @property
    def collective_timeout_s(self) -> float:
        """Longest time of a collective of the trainer ranks, in every process group."""
        return self.step_timeout_s + COLLECTIVE_MARGIN_S

    @property
    def packing_budget(self) -> int:
        """`max_tokens_per_microbatch`; where it is unset, and nothing else was found out, `DEFAULT_TOKENS`."""
        return self.max_tokens_per_microbatch or DEFAULT_TOKENS

    @property
    def optimizer_steps_per_batch(self) -> int:
        """Optimizer steps taken on each rollout batch, all passes together: what staleness counts."""
        return self.minibatches * self.batch_epochs

    def publishes(self, rollout_id: int) -> bool:
        """Whether the weights are due to be published after batch `rollout_id`."""
        return (rollout_id + 1) % self.update_weights_interval == 0


class WarmupConfig(Section):
    """Supervised training of the policy before the first rollout (same trainer, own optimizer state)."""

    steps: int = Field(default=0, ge=0)
    """Optimizer steps; 0 does no warm-up."""

    source: str = ""
    """Like data.source; records need a prompt and a response."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Like data.args."""

    size: int | None = Field(default=None, ge=1)
    """Like data.size."""

    response_key: str = "response"
    """Field that holds the target text."""

    batch_size: int = Field(default=64, ge=1)
    """Sequences per optimizer step."""

    lr: float = Field(default=1e-3, gt=0)
    """Learning rate, constant after a tenth of the steps."""

    seed: int = 0
    """Seed of the order and of generated data."""
