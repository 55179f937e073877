"""Makes stock SGLang run on any x86 CPU: the plugin that its entry point group `sglang.srt.platforms` names.

SGLang imports this module in every one of its processes, on GPUs too, so it imports nothing. It activates only where
the environment asks for it by name; the platform itself is in `sglang_cpu`. In an engine of a job it also keeps
the engine private (`private`).
"""

from __future__ import annotations

import os

PLATFORM_NAME = "asyncrl_cpu"
"""Value of SGLANG_PLATFORM that activates the plugin; the entry point's name."""


PRIVATE = "ASYNCRL_ENGINE_CONFIG"
"""Names the file with the key, in the environment of an engine of a job."""


def activate() -> str | None:
    """Dotted name of the platform class, or None where the environment does not ask for it."""
    if PRIVATE in os.environ:
        from asyncrl.inference.sglang.private import keep_private

        keep_private(os.environ[PRIVATE])
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM_NAME:
        return None
    return "asyncrl.inference.sglang.sglang_cpu:AnyCpuPlatform"
