"""Builds Megatron's GPTModel from an `Architecture`.

On a GPU with Transformer Engine the layers are Megatron's Transformer Engine layers. Everywhere else they are
Megatron's local layers with the norm and attention of `modules`. The parameters differ only in the names of the norms,
and `mapping` knows both. Never run so far: the Transformer Engine branch of `layer_spec`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, set_tensor_model_parallel_attributes
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from asyncrl.config.architecture import Architecture
from asyncrl.training.megatron.kernels import (
    Attention,
    attention_of,
    fuses_gradient_accumulation,
    uses_transformer_engine,
)
from asyncrl.training.megatron.mapping import entry
from asyncrl.training.megatron.modules import PackedAttention, PackedSequences, RMSNorm

_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
"""Megatron's fields for each `train.recompute`."""


def transformer_config(
    architecture: Architecture,
    *,
    dtype: torch.dtype,
    tensor_parallel: int,
    recompute: Literal["none", "mlp", "full"] = "none",
) -> TransformerConfig:
    """Megatron's description of the model. Dropout is always off: the policy that trains is the policy that samples.

    With tensor parallelism, what lies between the cut matrices (norms, residuals) is cut along the tokens.
    """
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_hidden_size,
        num_attention_heads=architecture.num_heads,
        num_query_groups=architecture.num_kv_heads,
        kv_channels=architecture.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        qk_layernorm=architecture.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        attention_softmax_in_fp32=True,
        tensor_model_parallel_size=tensor_parallel,
        sequence_parallel=tensor_parallel > 1,
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=False,  # every parameter comes from the checkpoint
        calculate_per_token_loss=True,  # gradients are divided by the trained tokens of the whole step
        gradient_accumulation_fusion=fuses_gradient_accumulation(),
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=uses_transformer_engine(),
        persist_layer_norm=False,
        **_RECOMPUTE[recompute],
    )


def layer_spec(config: TransformerConfig) -> ModuleSpec | TransformerBlockSubmodules:
    """The modules that the decoder is made of."""
    if uses_transformer_engine():
        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        device = torch.device("cuda", torch.cuda.current_device())
        if attention_of(device, config.params_dtype, config.kv_channels) is not Attention.TRANSFORMER_ENGINE:
            layer.submodules.self_attention.submodules.core_attention = PackedAttention
        return layer
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=RMSNorm)


def padded_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    """Rows of the embedding over all ranks: the next multiple of `tensor_parallel`."""
    return -(-vocab_size // tensor_parallel) * tensor_parallel


class PolicyModel(GPTModel):  # type: ignore[misc]
    """GPTModel that computes logits only for sampled tokens.

    With a vocabulary of 150 thousand, logits are the largest tensors of a step, and most tokens are often prompt.
    """

    def __init__(self, architecture: Architecture, config: TransformerConfig) -> None:
        super().__init__(
            config=config,
            transformer_layer_spec=layer_spec(config),
            vocab_size=padded_vocab_size(architecture.vocab_size, config.tensor_model_parallel_size),
            max_sequence_length=architecture.max_positions,
            parallel_output=True,
            share_embeddings_and_output_weights=architecture.tied_embeddings,
            position_embedding_type="rope",
            rotary_base=architecture.rope_theta,
            rope_scaling=architecture.rope_llama3_factor is not None,
            rope_scaling_factor=architecture.rope_llama3_factor or 1.0,
        )
        for name, parameter in self.named_parameters():
            # Initialisation, which is skipped, would have told Megatron which gradients differ among ranks.
            cut = entry(name).kind.cut
            if cut is not None and not hasattr(parameter, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(parameter, True, cut, 1)
        self._rows: Tensor | None = None
        self._gathers = config.sequence_parallel
        if self._gathers:  # rows are selected among all tokens, so they are gathered before the output layer
            self.output_layer.sequence_parallel = False
            self.output_layer.allreduce_dgrad = True
        self._positions: Tensor | None = None
        if not config.apply_rope_fusion:  # which goes by the ends of the sequences
            self.rotary_pos_emb.register_forward_hook(self._select_angles)
        self.output_layer.register_forward_pre_hook(self._select_rows)

    def forward(self, tokens: Tensor, positions: Tensor, sequences: PackedSequences, rows: Tensor) -> Tensor:
        """Logits at `rows`.

        Args:
            tokens, positions: int64 [1, tokens] of the packed sequences; a multiple of the tensor-parallel ranks.
            rows: int64 [rows]: places in `tokens` whose next token is predicted.

        Returns:
            [rows, vocabulary / tensor-parallel ranks].
        """
        self._rows, self._positions = rows, positions[0]
        logits: Tensor = super().forward(tokens, positions, None, packed_seq_params=sequences)
        return logits.squeeze(0)

    def _select_rows(self, module: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *rest = arguments  # hidden: [tokens, 1, hidden size], of the rank's share of the tokens if they are cut
        if self._gathers:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        assert self._rows is not None
        return (hidden.index_select(0, self._rows), *rest)

    def _select_angles(self, module: torch.nn.Module, arguments: tuple[Any, ...], angles: Tensor) -> Tensor:
        """From [positions, 1, 1, dim] of the longest sequence to [tokens, 1, 1, dim]: once, not in each layer."""
        assert self._positions is not None
        return angles.index_select(0, self._positions)
