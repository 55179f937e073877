"""Files and options as the user wrote them, laid over each other. Each value keeps its origin.

Invariants
- Later layers win: files in the order given, then the command line.
- Tables merge key by key. A table given as one literal on the command line (`--data.args {max_terms=3}`) replaces the
  table so far.
- No key is dropped: a key that does not exist becomes a Problem that names the nearest valid one.
- `none` means None for every field that can be None, in files (TOML has no null) and on the command line alike.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.config.checks.engine_args import PREFIX, RESERVED, engine_arguments
from asyncrl.config.nearest import did_you_mean, nearest
from asyncrl.config.problems import Problem, Problems
from asyncrl.config.reading.redaction import REDACTED
from asyncrl.config.reading.schema import ANY_NAME, FieldSpec, KeyPath, fields, settable_keys, spec_of, table_of


@dataclass(frozen=True, slots=True)
class Entry:
    """One value as written, and where it was written."""

    value: Any
    source: str


@dataclass(slots=True)
class Layers:
    """Entries by key, and the problems with the way in which they were written."""

    entries: dict[KeyPath, Entry] = field(default_factory=dict)
    problems: Problems = field(default_factory=Problems)
    meant: set[str] = field(default_factory=set)
    """Keys that the user most likely meant with misspelled ones. Their values are not those that the user wanted."""
    incomplete: bool = False
    """Whether a file could not be read, so that its settings stand at their defaults."""

    def add_file(self, name: str) -> None:
        """Lays a TOML file on top."""
        try:
            text = Path(name).read_text(encoding="utf-8-sig")  # some editors put a mark before the text
            table = tomllib.loads(text)
        except OSError as error:
            self._unreadable(name, f"cannot be read: {error.strerror} (looked in {Path.cwd()})")
        except UnicodeDecodeError:
            self._unreadable(name, "is not a text file in UTF-8")
        except tomllib.TOMLDecodeError as error:
            self._unreadable(name, f"is not valid TOML: {error}{_toml_hint(text, str(error))}")
        else:
            self._add_table((), table, name)

    def _unreadable(self, name: str, text: str) -> None:
        self.problems.add(name, text)
        self.incomplete = True

    def add_option(self, option: str, values: Sequence[str]) -> None:
        """Lays one `--key values…` of the command line on top."""
        path = _path_of(option.removeprefix("--"))
        spec = spec_of(path)
        table = table_of(path)
        key = ".".join(path)
        if table is None and spec is not None and spec.kind in ("section", "sections") and not spec.nullable:
            self.problems.add(option, f"is a section; write {option}.KEY VALUE")
            return
        if table is None and spec is None:
            self.problems.add(option, "unknown option" + self._suggestion(path, as_option=True))
            return
        try:
            value = option_value(spec, values) if spec is not None else entry_value(values)
        except ValueError as error:
            self.problems.add(key, str(error), option)
            return
        if spec is not None and isinstance(value, Mapping):
            self.forget(path)
            self._add_table(path, value, option)
            if not value:
                self._set(path, {}, option)
        else:
            self._set(path, value, option)

    def nested(self) -> dict[str, Any]:
        """The entries as nested tables, for validation."""
        root: dict[str, Any] = {}
        for path, entry in self.entries.items():
            at = root
            for part in path[:-1]:
                at = at.setdefault(part, {})
            at[path[-1]] = entry.value
        return root

    def source(self, path: KeyPath) -> str:
        """Where the value of a key comes from."""
        entry = self.entries.get(path)
        return "default" if entry is None else entry.source

    def _add_table(self, prefix: KeyPath, table: Mapping[str, Any], source: str) -> None:
        seen: set[KeyPath] = set()
        for name, value in table.items():
            path = (*prefix, str(name).replace("-", "_"))
            key = ".".join(path)
            if path in seen:
                self.problems.add(key, "given twice, with dashes and with underscores", source)
            seen.add(path)
            spec = spec_of(path)
            inside = table_of(path)
            if inside is not None:
                self._set(path, value, source)
            elif spec is None and "." in str(name):
                self.problems.add(key, f'"{name}" in quotes is one key with a dot in it; remove the quotes', source)
            elif spec is None:
                where = f"unknown key in {source}" if not source.startswith("--") else f"unknown key of {source}"
                self.problems.add(key, where + self._suggestion(path))
            elif spec.kind in ("section", "sections", "table") and isinstance(value, Mapping):
                if not value and not any(known[: len(path)] == path and known != path for known in self.entries):
                    self._set(path, {}, source)
                self._add_table(path, value, source)
            else:
                self._set(path, None if spec.nullable and value == "none" else value, source)

    def _set(self, path: KeyPath, value: Any, source: str) -> None:
        self.forget(path)
        # A parent that was set as a whole is split into its parts.
        for length in range(1, len(path)):
            parent = self.entries.pop(path[:length], None)
            if parent is not None and isinstance(parent.value, Mapping):
                for name, item in parent.value.items():
                    self.entries[(*path[:length], name)] = Entry(item, parent.source)
        self.forget(path)
        self.entries[path] = Entry(value, source)

    def _suggestion(self, path: KeyPath, *, as_option: bool = False) -> str:
        found = nearest_keys(path)
        self.meant.update(key for key in settable_keys() if key.startswith(tuple(f"{name}." for name in found)))
        self.meant.update(found)
        return did_you_mean(f"--{key.replace('_', '-')}" if as_option else key for key in found)

    def forget(self, path: KeyPath) -> None:
        """Drops a key and everything below it, so that its default stands."""
        for known in [known for known in self.entries if known[: len(path)] == path]:
            del self.entries[known]


_LINE = re.compile(r"at line (\d+)")
_WORD = re.compile(r"=\s*(None|none|null|nil|True|False)\b")


def _toml_hint(text: str, error: str) -> str:
    """What to write in place of another language's word for none, true or false."""
    at = _LINE.search(error)
    found = _WORD.search(text.splitlines()[int(at[1]) - 1]) if at is not None else None
    if found is None:
        return ""
    right = found[1].lower() if found[1] in ("True", "False") else '"none"'
    return f"; write {right}, not {found[1]}"


def option_value(spec: FieldSpec, values: Sequence[str]) -> Any:
    """The value that `values` spell for a field. Raises ValueError. Types and ranges are checked later."""
    if not values:
        if spec.takes(bool):
            return True
        raise ValueError(f"needs a value: {spec.expects}")
    if spec.nullable and list(values) == ["none"]:
        return None
    if spec.kind == "list":
        return _list_value(spec, values)
    if len(values) > 1:
        raise ValueError(f"takes one value, but {len(values)} follow ({' '.join(values)}); quote what belongs together")
    if spec.kind in ("table", "section"):
        value = literal(values[0])
        if not isinstance(value, dict):
            raise ValueError(f"{values[0]!r} is not a table; write {{name = value}}, or {spec.option}.NAME VALUE")
        return value
    return values[0]


def entry_value(values: Sequence[str]) -> Any:
    """The value of an entry of a table, whose type is unknown. Without any value it is a switch. Raises ValueError."""
    if len(values) > 1:
        raise ValueError(f"takes one value, but {len(values)} follow ({' '.join(values)}); write a list as [a, b]")
    return literal(values[0]) if values else True


def _list_value(spec: FieldSpec, values: Sequence[str]) -> list[Any]:
    if len(values) == 1 and values[0].startswith("["):
        value = literal(values[0])
        if not isinstance(value, list):
            raise ValueError(f"{values[0]!r} is not a list; write it as [a, b]")
        return value
    if str not in spec.accepts:
        return [part for value in values for part in value.split(",") if part]
    return list(values)


def literal(text: str) -> Any:
    """The value of a TOML or JSON literal (`3`, `true`, `[1, 2]`, `{a = 1}`, `{"a": 1}`); else the text itself.

    Raises ValueError for a literal that holds null.
    """
    if "#" in text and text[0] not in "\"'[{":
        # TOML would take the rest for a comment.
        return text
    for parse in (_toml_value, json.loads):
        try:
            value = parse(text)
        except ValueError:
            continue
        if value is None or not isinstance(value, bool | int | float | str | list | dict):
            return text
        if "null" in text and _holds_none(value):
            raise ValueError("null has no place in a configuration; leave the key out")
        return value
    return text


def _toml_value(text: str) -> Any:
    document = tomllib.loads(f"value = {text}")
    if len(document) != 1:
        raise ValueError("more than one value")
    return document["value"]


def _holds_none(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_holds_none(item) for item in value.values())
    if isinstance(value, list):
        return any(_holds_none(item) for item in value)
    return value is None


def _path_of(dotted: str) -> KeyPath:
    return tuple(part.replace("-", "_") for part in dotted.split("."))


_ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    "learning_rate": ("train.lr",),
    "loss": ("train.algorithm",),
    "n": ("rollout.samples_per_prompt",),
    "num_samples": ("rollout.samples_per_prompt",),
    "num_generations": ("rollout.samples_per_prompt",),
    "group_size": ("rollout.samples_per_prompt",),
    "batch_size": ("rollout.prompts_per_step",),
    "max_tokens": ("rollout.max_new_tokens",),
    "max_response_length": ("rollout.max_new_tokens",),
    "train.steps": ("train.num_steps",),
    "max_steps": ("train.num_steps",),
    "epochs": ("train.num_epochs",),
    "ppo_epochs": ("train.batch_epochs",),
    "num_iterations": ("train.batch_epochs",),
    "tp_size": ("engine.tensor_parallel", "train.tensor_parallel"),
    "tensor_parallel_size": ("engine.tensor_parallel", "train.tensor_parallel"),
    "data.path": ("data.source",),
    "data.file": ("data.source",),
    "model.name": ("model.path",),
    "model.dir": ("model.path",),
    "eval.interval": ("eval.every",),
    "reward.name": ("reward.function",),
    "directory": ("run.dir",),
    "output_dir": ("run.dir",),
}
"""Names of settings in other projects, with or without their section → our keys for them."""
_SECTIONS_ELSEWHERE = {"evaluation": ("eval",), "dataset": ("data",), "optimizer": ("train",)}


def nearest_keys(path: KeyPath) -> tuple[str, ...]:
    """The keys, or the section, that the user most likely meant with an unknown key.

    An argument of SGLang directly in `engine` is found as well.
    """
    dotted = ".".join(path)
    for name in (dotted, path[-1]):
        if name in _ELSEWHERE:
            return _ELSEWHERE[name]
    if len(path) == 1 and (section := _SECTIONS_ELSEWHERE.get(dotted) or nearest(dotted, _sections())):
        return section
    if path[0] == "engine" and len(path) == 2 and path[1] in engine_arguments().keys() - RESERVED.keys():
        return (f"{PREFIX}.{path[1]}",)
    known = [key.replace(f".{ANY_NAME}.", f".{path[1]}.") if len(path) > 1 else key for key in settable_keys()]
    return nearest(dotted, known)


def _sections() -> list[str]:
    return [spec.key for spec in fields().values() if spec.kind == "section" and len(spec.path) == 1]


def redacted_entries(entries: Mapping[KeyPath, Entry]) -> list[Problem]:
    """One problem for each secret that was blanked out when the configuration was saved: it must be given again."""
    return [
        Problem(".".join(path), "was blanked out when this configuration was saved; give the value again", entry.source)
        for path, entry in entries.items()
        if REDACTED in str(entry.value)
    ]
