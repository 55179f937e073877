"""What the script of code figures counts, on a small package made for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import code_size
from benchmarks.code_size import circles, code_lines, imports, measure, read_modules, table, type_only_circles

LOOP = '''"""A docstring
of two lines."""

from __future__ import annotations  # a comment beside code


class Thing:
    """What it is."""

    size: int = 3
    """Its unit."""

    def text(self) -> str:
        # Only a comment.
        return """one

        two"""
'''


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    files = {
        "__init__.py": "",
        "first.py": "from typing import TYPE_CHECKING, cast\n\nfrom pack import second\n\nx = cast(int, second.y)\n",
        "second.py": "def late(a, *b, c=1, **d):\n    from pack.first import x\n    return x\n\n\ny = 2\n",
        "deep/__init__.py": "",
        "deep/user.py": "from ..deep.helper import Help\n\nclass _Hidden:\n    def told(self): ...\n",
        "deep/helper.py": (
            "import typing\n\nif typing.TYPE_CHECKING:\n    from .user import _Hidden\n\n\n"
            'class Help:\n    """It helps."""\n\n    def by(self, hidden: "_Hidden", more, still_more): ...\n'
        ),
    }
    for name, source in files.items():
        path = tmp_path / "pack" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return tmp_path


def test_docstrings_comments_and_blanks_are_no_lines_of_code() -> None:
    assert code_lines(LOOP) == 1 + 2 + 1 + 3
    assert code_lines("") == 0


def test_a_checkout_is_measured_as_a_whole(checkout: Path) -> None:
    found = measure(checkout, "pack")
    assert (found.files, found.lines, found.code_lines, found.casts) == (6, 25, 15, 1)
    assert found.longest_file == ("pack/deep/helper.py", 10) and found.largest_folder == ("pack", 3)
    assert found.largest_parameter_list == ("pack.second.late", 4), "self is not counted"
    assert (found.public_names, found.without_docstring) == (3, 2), "late, Help and Help.by"


def test_an_import_inside_a_function_closes_a_circle_and_one_for_types_is_told_apart(checkout: Path) -> None:
    modules = read_modules(checkout, "pack")
    assert circles(imports(modules, type_only=False)) == [("pack.first", "pack.second")]
    assert type_only_circles(modules) == [("pack.deep.helper", "pack.deep.user")]


def test_a_circle_may_go_over_others() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [("a", "b", "c")]
    assert circles({"a": {"b"}, "b": set()}) == []


def test_two_checkouts_stand_side_by_side(checkout: Path) -> None:
    text = table({"before": measure(checkout, "pack"), "after": measure(checkout, "pack")})
    assert "| largest folder | 3 (pack) | 3 (pack) |" in text and "| code lines | 15 | 15 |" in text


def test_the_script_measures_another_checkout_or_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    package = tmp_path / code_size.PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text('"""Nothing."""\n\n\ndef one(): ...\n')
    command = [sys.executable, code_size.__file__, "--root"]
    told = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60).stdout
    assert "| public names | 1 |" in told
    refused = subprocess.run([*command, "/nowhere"], capture_output=True, text=True, timeout=60)
    assert refused.returncode != 0 and "/nowhere/asyncrl: no such folder" in refused.stderr
