"""The Megatron-core trainer. Importing this package loads megatron-core: two CPU seconds without a GPU, several with one."""

import warnings

from asyncrl.training.megatron.cpu_shim import quick_import

# On import it warns of every optional kernel library that is absent, which is the normal case without a GPU.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\b.*")

with quick_import():
    import megatron.core.distributed
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel.schedules
    import megatron.core.transformer  # noqa: F401
