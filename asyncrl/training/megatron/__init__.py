"""The Megatron-core trainer. Importing this package loads megatron-core, which takes seconds."""

import warnings

from asyncrl.training.megatron.cpu_shim import quick_import
from asyncrl.training.megatron.kernels import check_transformer_engine, tell_unused_transformer_engine

# On import Megatron warns of every optional kernel library that is absent, which is the normal case without a GPU;
# the others are about calls that it makes itself.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\b.*")
warnings.filterwarnings("ignore", category=UserWarning, message=r"The \.grad attribute of a Tensor that is not a leaf")
for _name in ("reduce_scatter_tensor", "all_gather_into_tensor"):
    warnings.filterwarnings("ignore", category=FutureWarning, message=rf"`torch\.distributed\.{_name}` is deprecated")

check_transformer_engine()
with quick_import():
    import megatron.core.distributed
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel.schedules
    import megatron.core.transformer  # noqa: F401
tell_unused_transformer_engine()
