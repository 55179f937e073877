"""A configuration that was read and checked, and how it came about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.config.layout import ProcessLayout
from asyncrl.config.machine import Machine
from asyncrl.config.memory.needs import JobMemory
from asyncrl.config.root import Config


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration that can work on this machine."""

    config: Config
    sources: Mapping[str, str]
    """Dotted key → `default`, the file as it was named, or the option as it was spelled."""
    machine: Machine
    layout: ProcessLayout
    warnings: tuple[str, ...] = ()
    """What the user should know about it, one sentence each."""
    memory: JobMemory | None = None
    """What the job needs of each device; None where the model's shape is not known."""
    planned: str | None = None
    """The machine of `--as`, for which a dry run plans in place of this one."""
