"""An SGLang platform for CPUs without AMX: SGLang's own CPU operations with PyTorch's attention.

Imported only inside an engine's processes (see `cpu_platform`).
"""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import PlatformCapabilities, PlatformEnum, SRTPlatform


class AnyCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]  # sglang is untyped
    """SGLang refuses its `intel_amx` default where AMX is missing; an out-of-tree platform may choose another."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        """PyTorch's own attention, which every CPU has."""
        return "torch_native"

    def init_backend(self) -> None:
        """Called in each worker, before it builds its attention."""
        from asyncrl.inference.sglang.cpu_attention import take_the_place_of_torch_native

        take_the_place_of_torch_native()

    def is_pin_memory_available(self, device: Any = None) -> bool:
        """False: memory is pinned for transfers to a GPU."""
        return False
