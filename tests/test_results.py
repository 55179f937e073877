"""Tests leave the checkout as it is, unless they are asked for their figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import results


@pytest.mark.parametrize("asked", ["", "1"])
def test_figures_are_written_into_the_checkout_only_where_they_are_asked_for(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setenv(results.ASKED, asked)
    results.keep("kills", {"kills": 5})
    assert [file.name for file in tmp_path.iterdir()] == (["kills.json"] if asked else [])
    assert ('"kills": 5' in capsys.readouterr().out) == (not asked)


def test_no_test_writes_figures_by_itself() -> None:
    tests = Path(__file__).parent
    named = re.compile(r'"benchmarks" / "results"|benchmarks/results')
    writers = [str(p.relative_to(tests)) for p in tests.rglob("*.py") if named.search(p.read_text())]
    assert set(writers) <= {"results.py", "test_results.py"}
