"""MegatronTrainer: one rank of the policy's training. Synchronous; lives in one thread per process.

Invariants
- Every public method is collective: all ranks call it with the same arguments, in the same order, each in the one
  thread that called `init`.
- The result of a step does not depend on how the batch is cut into micro-batches or over ranks (up to rounding).
- No weight changes before all ranks know that the step's loss and gradient are finite.

Never run so far (needs a GPU): bfloat16 with NCCL, Transformer Engine layers, `offload` and `onload` other than as
no-ops; the generators of a GPU in `snapshot` and `restore`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from safetensors import SafetensorError
from torch import Tensor

from asyncrl.config import Config
from asyncrl.data.batch import RolloutBatch
from asyncrl.data.saved_batch import batch_paths, save_batch
from asyncrl.errors import NonFiniteError
from asyncrl.training.algorithms import losses
from asyncrl.training.algorithms.advantages import group_advantages, groups_without_signal
from asyncrl.training.checkpoints.shard import Shard, Snapshot, capture_rng, restore_rng
from asyncrl.training.learner.collate import PackedTokens, check_batch, trained_sequences
from asyncrl.training.learner.packing import StepPlan, plan_steps
from asyncrl.training.learner.schedule import learning_rate
from asyncrl.training.megatron import cpu_shim
from asyncrl.training.megatron.checkpoint import Checkpoint, WeightExchange
from asyncrl.training.megatron.model import PolicyModel, transformer_config
from asyncrl.training.megatron.optimizer import Optimizer
from asyncrl.training.megatron.step import LossFunction, Tally, forward_backward, forward_logprobs
from asyncrl.training.models.architecture import check_tensor_parallel, read_architecture
from asyncrl.training.ranks.layout import RankLayout
from asyncrl.weights.buckets import TensorSpec

_OPTIMIZER = "optimizer."
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class MegatronTrainer:
    """Trains the policy of `config.model.path` with the other ranks of `layout`."""

    def __init__(self, config: Config, layout: RankLayout, *, failure_dir: Path | None = None) -> None:
        """Reads no weights yet.

        Args:
            failure_dir: where a batch with a NaN or infinite loss is saved; None is `failures/` in the run directory.

        Raises:
            ConfigError, ModelError: the model cannot be trained so.
        """
        self._config = config
        self._layout = layout
        self._failure_dir = failure_dir or config.run.dir / "failures"
        self._architecture = read_architecture(config.model.path)
        check_tensor_parallel(self._architecture, layout.tensor_parallel)

    def init(self) -> None:
        """Builds the model and loads the weights; torch.distributed is initialised already, with gloo or NCCL.

        Raises:
            ModelError: weights are missing, unreadable, or do not fit the config.
        """
        cpu_shim.install()
        config, layout = self._config, self._layout
        cuda = torch.cuda.is_available()
        self._device = torch.device("cuda", layout.local_rank) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self._device)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor_parallel,
            create_gloo_process_groups=False,
            distributed_timeout_minutes=math.ceil(config.train.step_timeout_s / 60),
        )
        # The inference tracker is Megatron's own way to do without CUDA's generators; nothing draws random numbers.
        tensor_parallel.model_parallel_cuda_manual_seed(config.train.seed, inference_rng_tracker=not cuda)

        dtype = _DTYPES[("bfloat16" if cuda else "float32") if config.model.dtype == "auto" else config.model.dtype]
        model_config = transformer_config(self._architecture, dtype=dtype, tensor_parallel=layout.tensor_parallel)
        model = PolicyModel(self._architecture, model_config).to(device=self._device, dtype=dtype)
        self._weights = WeightExchange(
            dict(model.named_parameters()),
            self._architecture,
            layout,
            parallel_state.get_tensor_model_parallel_group(),
        )
        checkpoint = Checkpoint(config.model.path)
        self._source_dtype = checkpoint.dtype()
        self._weights.load(checkpoint)
        self._optimizer = Optimizer(model, model_config, config.train, data_parallel=layout.data_parallel)

    def train(self, batch: RolloutBatch) -> dict[str, float]:
        """One training step on a rollout batch: `train.batch_epochs` passes over it, each of `train.minibatches`
        optimizer steps, with `train.loss` and one learning rate.

        Every pass takes the same mini-batches in the same order, with the advantages of the batch and the log-probs of
        the policy that sampled it; only the trainer's own are computed anew.

        Returns:
            Metrics by name (`train/...`), the same on every rank: over all optimizer steps, so that
            `train/trained_tokens` counts a token once in each pass. `train/logprob_diff_*` compares the trainer with
            the engine over the tokens of the first optimizer step of the first pass, computed before it.

        Raises:
            NonFiniteError: on every rank, before the step's weights change; the batch is saved.
            DataError: the batch holds ids outside the vocabulary or lengths that do not add up.
        """
        train = self._config.train
        minibatches, epochs = train.minibatches, train.batch_epochs
        lr = learning_rate(
            batch.rollout_id,
            peak=train.lr,
            warmup_steps=train.lr_warmup_steps,
            decay=train.lr_decay,
            total_steps=train.num_steps,
        )
        if train.loss == "sft":
            return self._run(
                batch, _sft_loss, lr=lr, temperature=1.0, minibatches=minibatches, epochs=epochs, compare=False
            )
        metrics = self._run(
            batch,
            self._grpo_loss(batch),
            lr=lr,
            temperature=batch.temperature,
            minibatches=minibatches,
            epochs=epochs,
            compare=True,
        )
        silent = groups_without_signal(batch.rewards, batch.group_index)
        return {**metrics, "train/groups_without_signal": float(silent)}

    def train_sft(self, batch: RolloutBatch, lr: float) -> dict[str, float]:
        """One optimizer step of cross entropy on the responses, at learning rate `lr` and temperature 1; as `train`."""
        return self._run(batch, _sft_loss, lr=lr, temperature=1.0, minibatches=1, epochs=1, compare=False)

    def reset_optimizer(self) -> None:
        """Forgets Adam's moments and step count; the weights stay."""
        self._optimizer.reset()

    def logprobs(self, batch: RolloutBatch) -> Tensor:
        """Log-probs of sampled tokens at the batch's temperature: float32 [T], 0 for context, equal on all ranks."""
        check_batch(batch, self._architecture.vocab_size)
        trained = (batch.sampled_lengths > 0).tolist()
        plans = self._plan(batch, trained, minibatches=1)
        micro_batches = plans[0].ranks[self._layout.data_parallel_rank] if plans else ()
        return forward_logprobs(
            self._optimizer.ddp,
            batch,
            micro_batches,
            vocab_size=self._architecture.vocab_size,
            device=self._device,
        )

    def tensor_specs(self) -> tuple[TensorSpec, ...]:
        """The tensors that `export_tensors` yields, in that order, in the numbers of training."""
        return self._weights.specs()

    def export_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (Hugging Face name, whole tensor) on every rank, streamed; see `WeightExchange.export`."""
        return self._weights.export()

    def export_hf(self, directory: Path, dtype: torch.dtype | None = None) -> None:
        """Writes a Hugging Face directory on rank 0, whole or not at all, by default in the source's dtype.

        Raises:
            OSError: on rank 0, after every rank has finished the export.
        """
        self._weights.export_directory(self._config.model.path, directory, dtype=dtype or self._source_dtype)

    def snapshot(self) -> Snapshot:
        """Copies weights, optimizer state and random number generators of this rank into host memory; on rank 0 the
        whole model too, in the source's dtype. Not while offloaded."""
        tensors, facts = self._optimizer.state()
        rng = capture_rng(tensor_parallel.get_cuda_rng_tracker().get_states(), self._device)
        shard = Shard(
            {**{f"{_OPTIMIZER}{name}": tensor for name, tensor in tensors.items()}, **rng.tensors},
            {"optimizer": facts, **rng.facts},
        )
        return Snapshot(shard, self._weights.collect(self._config.model.path, dtype=self._source_dtype))

    def restore(self, shard: Shard) -> None:
        """Goes on from what `snapshot` gave on the same rank of the same layout.

        Raises:
            CheckpointError: it was taken of another model.
        """
        tensors = {n.removeprefix(_OPTIMIZER): t for n, t in shard.tensors.items() if n.startswith(_OPTIMIZER)}
        self._optimizer.restore(tensors, shard.facts["optimizer"])
        tensor_parallel.get_cuda_rng_tracker().set_states(restore_rng(shard, self._device))

    def offload(self, *, keep_weights: bool) -> None:
        """Frees the GPU: Adam state goes to host memory, gradients are dropped. Nothing to do on CPU.

        The weights go too, unless they are kept, which an export needs.
        """
        if self._device.type == "cuda":
            self._optimizer.offload(keep_weights=keep_weights)

    def onload(self) -> None:
        """Undoes `offload`."""
        if self._device.type == "cuda":
            self._optimizer.onload()

    def _grpo_loss(self, batch: RolloutBatch) -> LossFunction:
        train, device = self._config.train, self._device
        advantages = group_advantages(batch.rewards, batch.group_index, normalize=train.normalize_advantages)

        def loss(logprobs: Tensor, packed: PackedTokens, mask: Tensor) -> losses.TokenLoss:
            return losses.grpo(
                logprobs,
                batch.logprobs[packed.places].to(device),
                advantages[packed.samples].to(device),
                mask,
                clip_low=train.clip_low,
                clip_high=train.clip_high,
            )

        return loss

    def _plan(self, batch: RolloutBatch, trained: list[bool], *, minibatches: int) -> tuple[StepPlan, ...]:
        return plan_steps(
            batch.sequence_lengths.tolist(),
            batch.sequence_groups.tolist(),
            trained,
            data_parallel=self._layout.data_parallel,
            max_tokens=self._config.train.max_tokens_per_microbatch,
            minibatches=minibatches,
        )

    def _run(
        self,
        batch: RolloutBatch,
        loss_function: LossFunction,
        *,
        lr: float,
        temperature: float,
        minibatches: int,
        epochs: int,
        compare: bool,
    ) -> dict[str, float]:
        check_batch(batch, self._architecture.vocab_size)
        plans = self._plan(batch, trained_sequences(batch), minibatches=minibatches) * epochs
        total, norms, skipped = Tally(), [], 0
        for number, plan in enumerate(plans):
            self._optimizer.zero_grad()
            tally = forward_backward(
                self._optimizer.ddp,
                batch,
                plan.ranks[self._layout.data_parallel_rank],
                loss_function,
                temperature=temperature,
                vocab_size=self._architecture.vocab_size,
                device=self._device,
                compare=compare and number == 0,
            )
            grad_norm = self._optimizer.grad_norm()
            if math.isfinite(tally.sums["loss"]) and math.isfinite(grad_norm):
                self._optimizer.step(lr, grad_norm)
                norms.append(grad_norm)
            elif self._config.train.on_nonfinite == "skip":
                skipped += 1
                continue
            else:
                self._stop(batch, plan, number, tally.sums["loss"], grad_norm)
            total.add(tally)
            if compare and number == 0:
                total.sums["compared"] = tally.sums["tokens"]
        return _metrics(total, norms, lr=lr, skipped=skipped, tokens=len(batch.tokens))

    def _stop(self, batch: RolloutBatch, plan: StepPlan, number: int, loss: float, grad_norm: float) -> None:
        """Raises NonFiniteError; every rank comes here, since loss and norm were reduced over all of them."""
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {grad_norm}"
        path, _ = batch_paths(self._failure_dir, batch.rollout_id)
        saved = f"the batch is saved in {path}"
        if self._layout.rank == 0:
            facts = {
                "what": what,
                "optimizer_step": number,
                "loss": str(loss),
                "grad_norm": str(grad_norm),
                "samples": sorted({batch.sample_ids[i] for i in batch.sample_index[list(plan.sequences)].tolist()}),
            }
            try:
                save_batch(batch, self._failure_dir, facts)
            except (OSError, SafetensorError) as error:  # a full disk must not hide why the run stops
                saved = f"the batch could not be saved in {path} ({error})"
        dist.barrier()  # the first rank to speak of it ends the job, so it waits for the batch
        raise NonFiniteError(
            f"{what} in optimizer step {number} of rollout {batch.rollout_id}, whose update was not applied; {saved}. "
            f'Lower train.lr or train.grad_clip, or set train.on_nonfinite = "skip" to go on without such steps'
        )


def _sft_loss(logprobs: Tensor, packed: PackedTokens, mask: Tensor) -> losses.TokenLoss:
    return losses.sft(logprobs, mask)


def _metrics(total: Tally, norms: list[float], *, lr: float, skipped: int, tokens: int) -> dict[str, float]:
    """Means per trained token; a step that trained nothing reports no means."""
    metrics = {
        "train/lr": lr,
        "train/tokens": float(tokens),
        "train/trained_tokens": total.sums.get("tokens", 0.0),
        "train/updates": float(len(norms)),
        "train/skipped_updates": float(skipped),
    }
    if norms:
        metrics["train/grad_norm"] = sum(norms) / len(norms)
    for key in total.sums:
        if key == "logprob_diff":
            metrics["train/logprob_diff_mean"] = total.sums[key] / total.sums["compared"]
            metrics["train/logprob_diff_max"] = total.maxima[key]
        elif key not in ("tokens", "compared"):
            metrics[f"train/{key}"] = total.mean(key)
    if "ratio_max" in total.maxima:
        metrics["train/ratio_max"] = total.maxima["ratio_max"]
    return metrics
