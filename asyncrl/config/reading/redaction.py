"""Secrets never reach a saved config, a report or an error message.

Invariant: every value of a configuration that is written or shown passes through `redacted` or `shown`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

REDACTED = "<redacted>"

_SECRET_WORDS = frozenset({"token", "password", "passwd", "passphrase", "secret", "secrets", "credentials"})
_SECRET_PAIRS = frozenset({"apikey", "accesskey", "privatekey", "authkey", "secretkey"})
_URL_LOGIN = re.compile(r"(?<=://)[^/\s@]+(?=@)")


def is_secret(key: str) -> bool:
    """Whether a key names a secret: `hf_token`, `api_key`, `dbPassword`; not `max_tokens`."""
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", key)]
    pairs = {first + second for first, second in pairwise(words)} | set(words)
    return bool(_SECRET_WORDS.intersection(words) or _SECRET_PAIRS.intersection(pairs))


def redacted(key: str, value: Any) -> Any:
    """`value` without its secrets: blanked out where the key names a secret, else only logins in URLs."""
    if is_secret(key) and not isinstance(value, bool | int | float | Mapping | None):
        return REDACTED
    if isinstance(value, str):
        return _URL_LOGIN.sub(REDACTED, value)
    if isinstance(value, Mapping):
        return {k: redacted(str(k), v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(redacted(key, item) for item in value)
    return value


def shown(key: str, value: Any) -> str:
    """`value` as a message may show it, without secrets."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(redacted(key, value))
