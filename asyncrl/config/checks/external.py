"""Engines that somebody else runs: which addresses and settings of theirs cannot work in a job. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from asyncrl.config.problems import Problem
from asyncrl.config.root import Config

KEY = "engine.external"


def external_problems(config: Config) -> Iterator[Problem]:
    """What is wrong with the urls, and with the way in which weights would reach them."""
    urls = config.engine.external
    if not urls:
        return
    for url in urls:
        if not _is_address(url):
            yield Problem(KEY, f"{url!r} is not the address of an engine; write http://host:port")
    if len({normal_url(url) for url in urls}) < len(urls):
        yield Problem(KEY, "names an engine twice; name each once")
    if config.engine.colocate or config.weights.transport == "tensor":
        yield Problem(
            KEY,
            "weights that are handed over in place (engine.colocate, weights.transport tensor) cannot reach engines "
            "that somebody else runs; use broadcast or disk for all engines",
        )
    away = [url for url in urls if _is_address(url) and not is_loopback(urlsplit(url).hostname or "")]
    if away and (config.weights.transport != "disk" or config.weights.directory is None):
        yield Problem(
            KEY,
            f"{', '.join(away)} is not on this machine, and a job's weights are broadcast on loopback only; set "
            "weights.transport to disk and weights.directory to a directory that has the same path there",
        )


def normal_url(url: str) -> str:
    """The one spelling of an engine's address: without a slash at its end, and with 127.0.0.1 for localhost."""
    return re.sub(r"^http://localhost:", "http://127.0.0.1:", url.rstrip("/"), flags=re.IGNORECASE)


def is_loopback(host: str) -> bool:
    """Whether an IPv4 address or `localhost` stays on this machine."""
    try:
        return ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    bare = parts.path in ("", "/") and not (parts.query or parts.fragment or parts.username or parts.password)
    return parts.scheme == "http" and bool(parts.hostname) and bool(port) and bare
