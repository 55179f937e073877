"""Installed packages against what the project asks for, and trackers against their accounts."""

from __future__ import annotations

import importlib.metadata
import netrc
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from asyncrl.config.sections.shown import TrackConfig
from asyncrl.doctor.finding import Finding, failed, ok, warning

Installed = Callable[[str], str | None]
"""Name of a package → its version; None where it is not installed."""

_SHOWN = 5
_INSTALL = "pip install -r requirements.lock"
_WANDB = "https://api.wandb.ai"


def python(version: str, asked: str) -> Finding:
    """The interpreter against `requires-python`."""
    if SpecifierSet(asked).contains(version):
        return ok("python", version)
    return failed("python", f"{version}, and asyncrl needs {asked}", "make the environment with another Python")


def packages(requirements: Sequence[str], installed: Installed) -> Finding:
    """What the project asks for, as pyproject.toml says it."""
    asked = [Requirement(line) for line in requirements]
    asked = [each for each in asked if each.marker is None or each.marker.evaluate({"extra": ""})]
    wrong = []
    for each in asked:
        version = installed(each.name)
        if version is None:
            wrong.append(f"{each.name} is missing")
        elif not each.specifier.contains(version, prereleases=True):
            wrong.append(f"{each.name} is {version}, not {each.specifier}")
    if wrong:
        return failed("packages", _first(wrong), _INSTALL)
    pinned = [f"{each.name} {installed(each.name)}" for each in asked if "==" in str(each.specifier)]
    return ok("packages", ", ".join(pinned) or f"{len(asked)} as asked for")


def lock(lines: Sequence[str], installed: Installed) -> Finding:
    """The set of versions that the tests ran with. Another one may work, and nobody has seen it."""
    pins = [line.split("==", 1) for line in lines if "==" in line and not line.lstrip().startswith("#")]
    others = []
    for name, rest in pins:
        asked, version = rest.split()[0].rstrip(";"), installed(name.strip())
        if version != asked:
            others.append(f"{name.strip()} {version or 'missing'} (tested: {asked})")
    if others:
        return warning("lock", f"{len(others)} of {len(pins)} packages differ: {_first(others)}", _INSTALL)
    return ok("lock", f"all {len(pins)} packages as tested")


def trackers(track: TrackConfig, environ: Mapping[str, str], netrc_hosts: Sequence[str]) -> Iterator[Finding]:
    """Whether the trackers of a configuration find their account. Whether they are installed the configuration says."""
    for name in track.to:
        args = track.args.get(name, {})
        mode = args.get("mode") or environ.get("WANDB_MODE", "online")
        if name != "wandb" or mode != "online":
            yield ok("tracker", f"{name}{'' if name != 'wandb' else f', {mode}'}")
            continue
        host = urlsplit(environ.get("WANDB_BASE_URL", _WANDB)).hostname
        if environ.get("WANDB_API_KEY") or host in netrc_hosts:
            yield ok("tracker", f"wandb, with a key for {host}")
        else:
            yield warning("tracker", f"wandb has no key for {host}", "wandb login, WANDB_API_KEY or WANDB_MODE=offline")


def look(track: TrackConfig) -> Iterator[Finding]:
    """Every check here, on this machine."""
    metadata = importlib.metadata.metadata("asyncrl")
    yield python(platform.python_version(), metadata["Requires-Python"] or "")
    versions = {canonicalize_name(d.name): d.version for d in importlib.metadata.distributions() if d.name}

    def installed(name: str) -> str | None:
        return versions.get(canonicalize_name(name))

    yield packages(importlib.metadata.requires("asyncrl") or [], installed)
    locked = Path(__file__).parents[2] / "requirements.lock"  # of a clone; a wheel has none
    if locked.is_file():
        yield lock(locked.read_text().splitlines(), installed)
    try:
        hosts = list(netrc.netrc().hosts)
    except (OSError, netrc.NetrcParseError):
        hosts = []
    yield from trackers(track, os.environ, hosts)


def _first(texts: Sequence[str]) -> str:
    more = f", and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + more
