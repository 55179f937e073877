"""Learner: one rank's training of a role, without the parts that a backend has to know.

It plans the optimizer steps of a batch, gives them their learning rate, stops or skips at figures that are not finite,
and turns tallies into metrics.

Invariants
- Every method is collective: all ranks call it with the same arguments, in the same order, each in its one thread.
- The result of a step does not depend on how the batch is cut into micro-batches or over ranks (up to rounding).
- No weight changes before all ranks know that the step's loss and gradient are finite.
- Weights that have diverged end the training at the step that made them, before they are published or saved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NoReturn

import structlog
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from asyncrl.algorithms.algorithm import OLD_LOGPROBS
from asyncrl.algorithms.chosen import SFT, make_algorithm, token_staleness
from asyncrl.algorithms.off_policy import mismatch
from asyncrl.config import Config
from asyncrl.data.batch import RolloutBatch
from asyncrl.data.saved_batch import batch_paths, save_batch
from asyncrl.errors import NonFiniteError
from asyncrl.training.learner.backend import Backend
from asyncrl.training.learner.collate import check_batch, trained_sequences
from asyncrl.training.learner.extremes import describe_extremes
from asyncrl.training.learner.packing import StepPlan, plan_steps
from asyncrl.training.learner.schedule import learning_rate
from asyncrl.training.learner.step_loss import (
    AGREEMENT,
    MISMATCH,
    MOVED,
    TOKENS,
    StepLoss,
    made_by_current_weights,
)
from asyncrl.training.learner.tally import Tally
from asyncrl.training.ranks.layout import RankLayout

MAX_GROWTH = 100.0
"""Weights have diverged where `Backend.growth` says more. Adam moves a weight by about the learning rate in a step, so
no healthy training comes near it, also with a large rate at its beginning. Not far over it, activations overflow."""

_log = structlog.get_logger(__name__)

METRICS: Mapping[str, str] = {
    "train/lr": "Learning rate of the step.",
    "train/tokens": "Tokens in the batch, prompts included.",
    "train/trained_tokens": "Tokens that the loss trained, once for each pass over the batch (train.batch_epochs).",
    "train/updates": "Optimizer steps taken: train.minibatches x train.batch_epochs, less those that were skipped.",
    "train/skipped_updates": 'Optimizer steps left out since loss or gradient were not finite (on_nonfinite = "skip").',
    "train/grad_norm": "Norm of the gradient before it is clipped to train.grad_clip, mean over the optimizer steps.",
    "train/loss": (
        "Loss per trained token. That of GRPO says little about progress: on policy it is near 0 whatever is learned. "
        "Look at the reward, the entropy and the gradient norm."
    ),
    "train/entropy": "Entropy of the policy in nat, mean over the trained tokens, at the sampling temperature.",
    "train/logprob_diff_mean": (
        "Trainer against engine: |log-prob of the trainer - log-prob of the engine|, mean over the tokens of the first "
        "optimizer step that were made by the very weights which the trainer holds. In float32 under 1e-4; more says "
        "that the engine computes another model. Absent where all tokens of the batch were made by older weights."
    ),
    "train/logprob_diff_max": "The largest of these differences.",
    "train/policy_moved_mean": (
        "The same over tokens made by older weights: how far the policy has moved since. Absent where there are none."
    ),
    "train/policy_moved_max": "The largest of these.",
}
"""What the figures of every step are; an algorithm adds its own."""


class Learner:
    """Trains what `backend` holds, together with the other ranks of `layout`."""

    def __init__(self, config: Config, layout: RankLayout, backend: Backend) -> None:
        self.backend = backend
        self._config = config
        self._layout = layout
        self._algorithm = make_algorithm(config)
        self._failures = config.run.dir / "failures"

    def train(self, batch: RolloutBatch) -> dict[str, float]:
        """One training step on a rollout batch: `train.batch_epochs` passes over it, each of `train.minibatches`
        optimizer steps, with the algorithm of the job and one learning rate.

        Every pass takes the same mini-batches in the same order, with the columns of the batch and the log-probs of the
        policy that sampled it; only the trainer's own are computed anew.

        Returns:
            Metrics by name (`train/...`), the same on every rank: over all optimizer steps, so that
            `train/trained_tokens` counts a token once in each pass. `METRICS` says what each is.

        Raises:
            NonFiniteError: on every rank; the batch is saved. The step's weights have not changed, or have diverged.
            DataError: the batch holds ids outside the vocabulary or lengths that do not add up.
            AlgorithmError: the algorithm failed, or returned what cannot be trained on.
        """
        train = self._config.train
        lr = learning_rate(
            batch.rollout_id,
            peak=train.lr,
            warmup_steps=train.lr_warmup_steps,
            decay=train.lr_decay,
            total_steps=train.num_steps,
        )
        compared: dict[str, float] = {}
        if self._algorithm.needs.old_logprobs and OLD_LOGPROBS not in batch.columns:
            judged = replace(batch, temperature=StepLoss(batch, self._algorithm, None).temperature)
            batch = replace(batch, columns={**batch.columns, OLD_LOGPROBS: self.logprobs(judged)})
        if (old := batch.columns.get(OLD_LOGPROBS)) is not None and self._algorithm.needs.engine_logprobs:
            trained = batch.loss_mask
            compared = mismatch((old - batch.logprobs)[trained], token_staleness(batch)[trained])
        current = None
        if self._algorithm.needs.engine_logprobs:
            current = made_by_current_weights(batch, keeps_kv=self._config.weights.on_update == "in_place")
        loss = StepLoss(batch, self._algorithm, current)
        metrics = self._run(loss, lr, minibatches=train.minibatches, epochs=train.batch_epochs)
        return metrics | {f"train/{name}": value for name, value in compared.items()}

    def train_sft(self, batch: RolloutBatch, lr: float) -> dict[str, float]:
        """One optimizer step of cross entropy on the responses, at learning rate `lr` and temperature 1; as `train`."""
        return self._run(StepLoss(batch, SFT, current=None), lr, minibatches=1, epochs=1)

    def logprobs(self, batch: RolloutBatch) -> Tensor:
        """Log-probs of sampled tokens at the batch's temperature.

        Returns:
            float32 [T], 0 for context; the same on every rank.

        Raises:
            DataError: as `train`.
        """
        check_batch(batch, self.backend.vocab_size)
        plans = self._plan(batch, (batch.sampled_lengths > 0).tolist(), minibatches=1)
        return self.backend.logprobs(batch, plans[0].ranks[self._layout.data_parallel_rank] if plans else ())

    def _plan(self, batch: RolloutBatch, trained: list[bool], *, minibatches: int) -> tuple[StepPlan, ...]:
        return plan_steps(
            batch.sequence_lengths.tolist(),
            batch.sequence_groups.tolist(),
            trained,
            data_parallel=self._layout.data_parallel,
            max_tokens=self._config.train.packing_budget,
            minibatches=minibatches,
        )

    def _run(self, loss: StepLoss, lr: float, *, minibatches: int, epochs: int) -> dict[str, float]:
        """Takes every optimizer step of `epochs` passes; returns the metrics."""
        batch, backend = loss.batch, self.backend
        check_batch(batch, backend.vocab_size)
        plans = self._plan(batch, trained_sequences(batch), minibatches=minibatches) * epochs
        total, norms, compared = Tally(), list[float](), dict[str, float]()
        for number, plan in enumerate(plans):
            weights = loss.algorithm.needs.aggregation.weights(batch, plan.sequences)
            current = loss.current if number == 0 else None  # the weights have moved since
            step_loss = replace(loss, current=current, weights=weights)
            tally = backend.forward_backward(batch, plan.ranks[self._layout.data_parallel_rank], step_loss)
            grad_norm = backend.grad_norm()
            if math.isfinite(tally.sums["loss"]) and math.isfinite(grad_norm):
                backend.step(lr, grad_norm)
                norms.append(grad_norm)
                if step_loss.current is not None:
                    compared = _compared(tally)
                total.add(tally)
                continue
            loss_sum = tally.sums["loss"]
            what = f"the loss is {loss_sum}" if not math.isfinite(loss_sum) else f"the gradient norm is {grad_norm}"
            extremes = describe_extremes(batch, plan.sequences, tally.maxima)
            if self._config.train.on_nonfinite == "stop":
                self._stop(batch, plan, number, what, extremes)
            if self._layout.rank == 0:
                _log.warning(
                    "an optimizer step is skipped", rollout=batch.rollout_id, step=number, reason=what, batch=extremes
                )
        if norms and (growth := backend.growth()) > MAX_GROWTH:
            self._stop_diverged(batch, len(plans), lr, growth)
        trained = total.sums.pop("tokens", 0.0)
        metrics = {
            "lr": lr,
            "tokens": float(len(batch.tokens)),
            "trained_tokens": trained,
            "updates": float(len(norms)),
            "skipped_updates": float(len(plans) - len(norms)),
            **({"grad_norm": sum(norms) / len(norms)} if norms else {}),
            **{name: value / trained for name, value in total.sums.items()},  # a step that trained nothing has none
            **total.maxima,
            **compared,
        }
        return {f"train/{name}": value for name, value in metrics.items()}

    def _stop(self, batch: RolloutBatch, plan: StepPlan, number: int, what: str, extremes: str) -> NoReturn:
        """Raises NonFiniteError; every rank calls it, since loss and norm were reduced over all of them."""
        samples = sorted({batch.sample_ids[i] for i in batch.sample_index[list(plan.sequences)].tolist()})
        saved = self._save(batch, {"what": what, "optimizer_step": number, "extremes": extremes, "samples": samples})
        raise NonFiniteError(
            f"{what} in optimizer step {number} of rollout {batch.rollout_id}, whose update was not applied; "
            f'{saved}; {extremes}. train.on_nonfinite = "skip" goes on without such steps'
        )

    def _stop_diverged(self, batch: RolloutBatch, updates: int, lr: float, growth: float) -> NoReturn:
        """Raises NonFiniteError; every rank calls it. The weights before are gone, so no setting skips this step."""
        what = (
            f"weights are {growth:.3g} times as large as before training"
            if math.isfinite(growth)
            else ("weights are not finite any more")
        )
        saved = self._save(batch, {"what": what, "lr": lr, "updates": updates})
        raise NonFiniteError(
            f"{what}, after rollout {batch.rollout_id} at learning rate {lr:g}: the training has diverged. They are "
            f"neither published nor saved; {saved}. Lower train.lr and go on from an earlier checkpoint, or begin anew"
        )

    def _save(self, batch: RolloutBatch, facts: Mapping[str, object]) -> str:
        """Saves the batch on which training stops, once for all ranks; tells where."""
        path, _ = batch_paths(self._failures, batch.rollout_id)
        saved = f"the batch is saved in {path}"
        if self._layout.rank == 0:
            try:
                save_batch(batch, self._failures, facts)
            except (OSError, SafetensorError) as error:  # a full disk must not hide why the run stops
                saved = f"the batch could not be saved in {path} ({error})"
        dist.barrier()  # the first rank that reports a failure ends the job, so all wait until the batch is saved
        return saved


def _compared(tally: Tally) -> dict[str, float]:
    """Takes out of `tally` what was compared with the engine, where it has tokens."""
    compared: dict[str, float] = {}
    for name in (AGREEMENT, MOVED):
        total, tokens, largest = tally.sums.pop(name), tally.sums.pop(name + TOKENS), tally.maxima.pop(name)
        if tokens:
            compared |= {f"{name}_mean": total / tokens, f"{name}_max": largest}
    total, tokens = tally.sums.pop(MISMATCH), tally.sums.pop(MISMATCH + TOKENS)
    if tokens:
        compared[MISMATCH] = total / tokens
    return compared
