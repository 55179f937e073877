"""Whether torch can use the GPUs that the job was planned with.

The layout asks the driver, and torch asks CUDA. Where a driver is older than the wheels, the first sees GPUs and the
second none: without this check ranks would train on the CPU, while their engines end on the GPUs.
"""

from __future__ import annotations

import torch

from asyncrl.config.machine import OLDEST_DRIVER, Machine, driver_version
from asyncrl.errors import TrainerError


def check_device(machine: Machine) -> None:
    """Raises TrainerError where torch sees fewer GPUs than the layout has, or sees some where it has none."""
    usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if machine.gpus and usable < len(machine.gpus):
        cuda = torch.version.cuda or "none"
        wanted = OLDEST_DRIVER.get(int(cuda.split(".")[0])) if torch.version.cuda else None
        needs = f" needs driver {wanted} or newer," if wanted else " needs a newer driver,"
        raise TrainerError(
            f"the NVIDIA driver ({driver_version() or 'unknown'}) shows {len(machine.gpus)} GPUs, and torch can use "
            f"{usable}: the CUDA of its wheels ({cuda}){needs} or a GPU is out of order; asyncrl doctor tells which"
        )
    if usable and not machine.gpus:
        raise TrainerError(
            f"torch can use {usable} GPUs, and NVML, which the layout asks, shows none: in a container set "
            'NVIDIA_DRIVER_CAPABILITIES=compute,utility; to run on the CPU set CUDA_VISIBLE_DEVICES=""'
        )
