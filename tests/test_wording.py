"""Messages count in plain English: `1 engine`, `2 engines`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import asyncrl
from asyncrl.errors import counted
from asyncrl.observability.run_view import engines_text
from asyncrl.observability.timeline import TIMELINE, Wording

SOURCES = sorted(Path(asyncrl.__file__).parent.rglob("*.py"))
PLURAL = re.compile(r"\((s|es|ies)\)")
COUNTED = re.compile(r"\{\w+:([a-z][a-z ]+)\}")


def test_one_thing_is_not_told_as_many() -> None:
    assert [counted(n, "engine") for n in (0, 1, 2)] == ["0 engines", "1 engine", "2 engines"]
    assert [counted(n, "batch", "batches") for n in (1, 2)] == ["1 batch", "2 batches"]
    assert engines_text(1, 1) == "the engine serves"


def test_no_message_leaves_the_plural_to_its_reader() -> None:
    found = [
        f"{path}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and PLURAL.search(node.value)
        if "O(s)" not in node.value
    ]
    assert found == []


@pytest.mark.parametrize("kind", TIMELINE)
def test_the_timeline_counts_one_thing_as_one(kind: str) -> None:
    wording = TIMELINE[kind]
    nouns = COUNTED.findall(wording.text) if isinstance(wording.text, str) else []
    fields = ("engines", "ranks", "tensors", "bytes", "restarts", "count", "num_samples", "seconds")
    told = wording.entry({"group_ids": ["a"], **dict.fromkeys(fields, 1)}).text
    assert all(f"1 {noun}" in told and f"1 {noun}s" not in told for noun in nouns)
    assert not re.search(r"\b1 (engine|rank|sample|ended group|restart)s\b", told)


def test_a_count_that_an_event_lacks_is_a_question_mark() -> None:
    assert Wording("x", "{engines:engine} and {ranks:rank} in {seconds:.1f} s").entry({"ranks": 2}).text == (
        "? engines and 2 ranks in ? s"
    )
