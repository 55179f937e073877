"""From the command line to a validated configuration: `train.py @ recipe.toml [@ more.toml ...] --train.lr 1e-3`.

Invariants
- A configuration is returned only when nothing is wrong with it. Otherwise every problem is listed at once, one a line.
- Every value knows its origin: `default`, the file, or the option.
- Nothing here imports torch or SGLang, so that help and refusals come in a fraction of a second.

The command line follows the schema: an option is a dotted key, with dashes or underscores. So a recipe's key and its
option are spelled alike, and one look-up names the nearest valid key for both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from asyncrl.config.checks.inputs import input_problems, read_model_facts
from asyncrl.config.checks.validation import config_problems, config_warnings
from asyncrl.config.machine import Machine, rank_of
from asyncrl.config.memory.planned import MOST_GPUS, planned_machine
from asyncrl.config.memory.sized import sized_job
from asyncrl.config.placement.rules import derive_layout
from asyncrl.config.problems import InvalidConfigError, Problem, Problems
from asyncrl.config.reading.layers import Layers, redacted_entries
from asyncrl.config.reading.loaded import LoadedConfig
from asyncrl.config.reading.redaction import shown
from asyncrl.config.reading.schema import FieldSpec, KeyPath, spec_of, table_of
from asyncrl.config.root import Config

_AS, _RANKS = "--as", "--nproc-per-node"


@dataclass(frozen=True, slots=True)
class CommandLine:
    """argv in parts."""

    files: tuple[str, ...]
    options: tuple[tuple[str, tuple[str, ...]], ...]
    """`--key` and the values that follow it, in order."""
    dry_run: bool
    help: bool
    plan: tuple[str | None, int | None]
    """`--as` and `--nproc-per-node`: a machine to plan for in place of this one, and trainer ranks on each node."""
    problems: tuple[Problem, ...]


def load_config(argv: Sequence[str], *, dry_check: Callable[[LoadedConfig], None] | None = None) -> LoadedConfig:
    """The configuration that `argv` (without the program's name) asks for on this machine.

    `--help` and `--dry-run` print on rank 0 and raise SystemExit(0) on every rank. A dry run first calls `dry_check`,
    which raises for problems that only the start itself would find. Raises InvalidConfigError.
    """
    line = parse_command_line(argv)
    if line.help:
        if rank_of() == 0:
            from asyncrl.config.reading.help import print_help

            print_help(sys.stdout)
        raise SystemExit(0)
    loaded = resolve(line, Machine.detect(), dry_run=line.dry_run)
    if loaded.machine.rank == 0:
        for warning in loaded.warnings:
            print(f"warning: {warning}", file=sys.stderr, flush=True)
    if line.dry_run:
        if loaded.machine.rank == 0:
            from asyncrl.config.reading.report import dry_run_report

            if dry_check is not None:
                dry_check(loaded)
            print(dry_run_report(loaded), end="")
        raise SystemExit(0)
    return loaded


def parse_command_line(argv: Sequence[str]) -> CommandLine:
    """Splits argv. The words after an option, up to the next option or `@`, are its values."""
    files: list[str] = []
    options: list[tuple[str, tuple[str, ...]]] = []
    problems = Problems()
    switches: set[str] = set()
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if not _is_text(token):
            problems.add(ascii(token), "is not valid UTF-8")
        elif token.startswith("@"):
            name = token[1:] or (rest.pop(0) if rest and _is_value(rest[0]) else "")
            if name:
                files.append(name)
            else:
                problems.add("@", "needs a file: @ recipe.toml")
        elif token in ("-h", "--help", "--dry-run", "--dry_run"):
            switches.add(token.replace("_", "-"))
        elif _is_option(token):
            option, equals, value = token.partition("=")
            values = [value] if equals else []
            while not equals and rest and _is_value(rest[0]):
                values.append(rest.pop(0))
            options.append((option, tuple(values)))
        else:
            hint = (
                f"; did you mean @ {token}?" if token.endswith(".toml") else "; options are written --section.key value"
            )
            problems.add(token, f"unexpected argument{hint}")
    plan = _plan(options, problems, dry_run="--dry-run" in switches)
    return CommandLine(
        files=tuple(files),
        options=tuple(options),
        dry_run="--dry-run" in switches,
        help=bool(switches & {"-h", "--help"}),
        plan=plan,
        problems=tuple(problems),
    )


def _plan(
    options: list[tuple[str, tuple[str, ...]]], problems: Problems, *, dry_run: bool
) -> tuple[str | None, int | None]:
    """Takes the options that are no settings out of `options`."""
    found: dict[str, str] = {}
    for option, values in [*options]:
        name = option.replace("_", "-")
        if name in (_AS, _RANKS):
            options.remove((option, values))
            found[name] = values[0] if len(values) == 1 else ""
    ranks = found.get(_RANKS)
    if found.get(_AS) == "":
        problems.add(_AS, "needs a machine: --as 8x80GB, --as 8xH100, --as 2x8x80GB")
    if ranks is not None and not (ranks.isdecimal() and 1 <= int(ranks) <= MOST_GPUS):
        problems.add(_RANKS, "needs the number of trainer ranks on a node")
    elif ranks is not None and _AS not in found:
        problems.add(_RANKS, f"is an option of torchrun; here it goes with {_AS} alone, a machine that is not here")
    elif found and not dry_run:
        problems.add(_AS, "plans for a machine that is not here; give --dry-run too")
    return (None, None) if problems else (found.get(_AS), None if ranks is None else int(ranks))


def resolve(line: CommandLine, machine: Machine, *, dry_run: bool = False) -> LoadedConfig:
    """Reads, merges and checks everything. Raises InvalidConfigError with all problems.

    `dry_run`: nothing will be started, so that an estimate of the memory is enough to refuse.
    """
    layers = Layers(problems=Problems(line.problems))
    for name in line.files:
        layers.add_file(name)
    for option, values in line.options:
        layers.add_option(option, values)
    problems = layers.problems
    problems += redacted_entries(layers.entries)
    config = build_config(layers)
    written, ranks = line.plan
    if written is not None:
        machine = planned_machine(written, ranks, machine, config)
    layout, checks = derive_layout(config, machine)
    sized = None if layout is None else sized_job(config, layout, machine, dry_run=dry_run)
    if sized is not None:
        config, checks = sized.config, Problems([*checks, *sized.problems])
    if not line.problems and not layers.incomplete:
        checks += config_problems(config, machine, read_model_facts(config.model.path))
        checks += input_problems(config)
        # A setting that was refused or misspelled stands at its default here: a complaint about it would mislead.
        blamed = {problem.key for problem in problems} | layers.meant
        for p in checks:
            if p.key not in blamed:
                problems.add(p.key, p.text, layers.source(tuple(p.key.split("."))))
    if problems or layout is None:
        raise InvalidConfigError(problems)
    return LoadedConfig(
        config,
        _sources(config, layers) | (sized.sources if sized is not None else {}),
        machine,
        layout,
        warnings=tuple(config_warnings(config)),
        memory=sized.memory if sized is not None else None,
        planned=written,
    )


def _is_option(token: str) -> bool:
    """Whether a word is `--key` or `-h`. A dash before a digit begins a number."""
    return token == "-h" or (token.startswith("--") and token[2:3].isalpha())


def _is_value(token: str) -> bool:
    """Whether a word can be the value of an option. A value that starts with @ or -- is written --key=value."""
    return not _is_option(token) and not token.startswith("@") and _is_text(token)


def _is_text(token: str) -> bool:
    """False for a word that was not UTF-8. (Python carries such bytes as lone surrogates.)"""
    return not any(0xD800 <= ord(character) <= 0xDFFF for character in token)


def build_config(layers: Layers) -> Config:
    """The config from the valid entries. The others become problems of `layers`, and stand at their defaults."""
    for path, entry in list(layers.entries.items()):
        spec = spec_of(path)
        if spec is not None and spec.kind == "scalar" and isinstance(entry.value, bool) and not spec.takes(bool):
            _refuse(spec, path, layers)  # else true would pass as the number 1
    while True:
        try:
            return Config.model_validate(layers.nested())
        except ValidationError as error:
            for path in dict.fromkeys(_known_path(detail["loc"]) for detail in error.errors()):
                spec = spec_of(path) or table_of(path)
                assert spec is not None, f"pydantic refused {path}, which is no field"
                _refuse(spec, path, layers)


def _refuse(spec: FieldSpec, path: KeyPath, layers: Layers) -> None:
    """Makes an entry a problem and puts its key back to its default."""
    expects = spec.expects.partition(" of ")[2] if spec.path != path else spec.expects
    value: Any = layers.nested()
    for part in path:
        value = value[part]
    text = f"{shown(path[-1], value)} is not allowed; expected {expects}"
    layers.problems.add(".".join(path), text, layers.source(path))
    layers.forget(path)


def _known_path(location: tuple[int | str, ...]) -> KeyPath:
    """The field or table entry of a pydantic error. Deeper parts of its location are list indices and union members."""
    parts = tuple(str(part) for part in location)
    for length in range(len(parts), 0, -1):
        spec = spec_of(parts[:length])
        if spec is not None:
            return parts[: length + 1] if spec.kind == "table" and len(parts) > length else parts[:length]
    raise AssertionError(f"pydantic refused {location}, which is no field")


def _sources(config: Config, layers: Layers) -> dict[str, str]:
    sources: dict[str, str] = {}

    def visit(path: KeyPath, value: Any) -> None:
        if isinstance(value, dict) and value and table_of(path) is None:
            for name, item in value.items():
                visit((*path, name), item)
        else:
            sources[".".join(path)] = layers.source(path)

    visit((), config.model_dump())
    return sources
