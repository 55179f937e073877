"""A configuration as TOML, complete and without secrets. Reading it back gives the same configuration.

TOML has no None, so it is written as "none".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import date, time
from typing import Any

import tomlkit

from asyncrl.config.reading.redaction import redacted
from asyncrl.config.reading.schema import KeyPath, spec_of
from asyncrl.config.root import Config

_COMMENT_COLUMN = 44


def config_toml(config: Config, sources: Mapping[str, str] | None = None) -> str:
    """All values in the order of their declaration. With `sources`, a comment names the origin of each."""
    return "\n".join(_section((), config.model_dump(), sources)).lstrip("\n") + "\n"


def _section(path: KeyPath, values: Mapping[str, Any], sources: Mapping[str, str] | None) -> Iterator[str]:
    below = []
    if path:
        yield ""
        yield f"[{_key(path)}]"
    for name, value in values.items():
        inner = (*path, name)
        spec = spec_of(inner)
        assert spec is not None
        if spec.kind == "section" and value is not None:
            below.append((inner, value))
        elif spec.kind == "sections":
            below += [((*inner, entry), section) for entry, section in value.items()]
        elif spec.kind == "table" and value:
            for entry, item in value.items():
                yield _line(_key((name, entry)), redacted(entry, item), ".".join((*inner, entry)), sources)
        else:
            yield _line(_key((name,)), redacted(name, value), ".".join(inner), sources)
    for inner, value in below:
        yield from _section(inner, value, sources)


def _line(key: str, value: Any, dotted: str, sources: Mapping[str, str] | None) -> str:
    line = f"{key} = {_item(value).as_string()}"
    if sources is None:
        return line
    return f"{line:<{_COMMENT_COLUMN}} # {_one_line(sources.get(dotted, 'default'))}"


def _key(path: KeyPath) -> str:
    return ".".join(tomlkit.key(part).as_string() for part in path)


def _one_line(text: str) -> str:
    """A file name without control characters, which a comment may not hold."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _item(value: Any) -> Any:
    if isinstance(value, Mapping):
        table = tomlkit.inline_table()
        for name, item in value.items():
            table.append(tomlkit.key(str(name)), _item(item))
        return table
    if isinstance(value, list | tuple):
        array = tomlkit.array()
        for item in value:
            array.append(_item(item))
        return array
    if value is None:
        return tomlkit.string("none")
    return tomlkit.item(value if isinstance(value, bool | int | float | str | date | time) else str(value))
