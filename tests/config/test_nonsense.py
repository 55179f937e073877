"""Whatever is written, the answer is a configuration or a list of problems, never a traceback."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.machine import Machine
from asyncrl.config.problems import InvalidConfigError
from asyncrl.config.reading.loading import parse_command_line, resolve
from asyncrl.config.reading.schema import fields
from tests.config.conftest import Load

# The system can carry any character in an argument but this one.
TEXT = st.text(st.characters(exclude_characters="\0"), max_size=8)
OPTIONS = [spec.option for spec in fields().values()]
TOKENS = st.one_of(
    st.sampled_from(OPTIONS),
    st.builds("{}.{}".format, st.sampled_from(OPTIONS), TEXT),
    st.builds("{}={}".format, st.sampled_from(OPTIONS), TEXT),
    st.sampled_from(["@", "--", "-h", "--dry-run", "none", "true", "[1, 'a']", "{a = 1}", '{"a": null}', "["]),
    st.sampled_from(["nan", "1e999", "-1", "1,2", "@x"]),
    TEXT,
    st.integers().map(str),
)
VALUES = st.recursive(
    st.none().map(lambda _: "none") | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)
MACHINES = st.builds(
    lambda ranks, gpus: Machine(world_size=ranks, local_world_size=ranks, gpus=tuple(map(str, range(gpus)))),
    st.integers(1, 5),
    st.integers(0, 4),
)


def answer(argv: list[str], machine: Machine) -> None:
    with contextlib.suppress(InvalidConfigError):
        resolve(parse_command_line(argv), machine)


@settings(max_examples=100)
@given(st.lists(TOKENS, max_size=8), MACHINES)
def test_any_command_line_is_answered(argv: list[str], machine: Machine) -> None:
    answer(argv, machine)


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ("run", "dir"),
        ("model", "path"),
        ("data", "source"),
        ("rollout", "stop"),
        ("reward", "args"),
        ("engine", "server_args"),
    ],
)
def test_a_nul_character_is_refused_by_the_key_that_holds_it(load: Load, table: str, key: str) -> None:
    value = {"stop": '["a\\u0000b"]', "args": '{name = "a\\u0000b"}', "server_args": '{"a\\u0000b" = 1}'}.get(
        key, '"a\\u0000b"'
    )
    with pytest.raises(InvalidConfigError, match=rf"{table}\.{key}.*not allowed"):
        load(toml=f"[{table}]\n{key} = {value}\n")


@settings(max_examples=100)
@given(st.lists(st.tuples(st.sampled_from(list(fields())), VALUES), max_size=6), MACHINES)
def test_any_file_is_answered(written: list[tuple[tuple[str, ...], Any]], machine: Machine) -> None:
    table: dict[str, Any] = {}
    for path, value in written:
        at = table
        for part in path[:-1]:
            if not isinstance(at.get(part), dict):
                at[part] = {}
            at = at[part]
        at[path[-1]] = value
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "nonsense.toml"
        file.write_text(tomlkit.dumps(table))
        answer(["@", str(file)], machine)
