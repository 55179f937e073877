"""`--help`: every option with its type, default and purpose, from the schema."""

from __future__ import annotations

import io
import re
import shutil
import sys
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncrl.config.reading.schema import FieldSpec, fields

_USAGE = """\
usage: {program} [@ RECIPE.toml ...] [--SECTION.KEY VALUE ...] [--dry-run [--as MACHINE]] [--help]

Later files win over earlier ones, options over files. Dashes and underscores are the same. `none` unsets what may be
unset; lists take several values (--rollout.stop A B) or a literal ([1, 2]); a table takes --TABLE.NAME VALUE or
a literal ({name = 1}). A value that starts with @ or -- is written --SECTION.KEY=VALUE.

  --dry-run   print the resolved configuration with the origin of each value, the process layout, and the memory that
              each process needs; start nothing, and refuse what does not fit
  --as 8x80GB, --as 8xH100, --as 2x8x80GB   with --dry-run: plan for that machine; config.json and tokenizer of the
              model are enough. --nproc-per-node N: trainer ranks on each node, as torchrun would start them
  --help, -h  print this
"""


_PADDING = re.compile(r" +$", re.MULTILINE)
"""Blanks with which rich fills a table to its width."""


def print_help(stream: TextIO) -> None:
    """Writes the help, 100 to 160 columns wide as the terminal allows."""
    width = min(160, max(100, shutil.get_terminal_size(fallback=(120, 0)).columns))
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=stream.isatty(),
        highlight=False,
        emoji=False,
        markup=False,
    )
    console.print(_USAGE.replace("{program}", Path(sys.argv[0]).name))
    sections: list[tuple[FieldSpec, Table]] = []
    for spec in fields().values():
        if spec.kind == "section":
            table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
            table.add_column(ratio=1, min_width=34)
            table.add_column(ratio=2)
            sections.append((spec, table))
            continue
        if spec.kind == "sections":  # described where its fields are
            continue
        owner = next(table for section, table in reversed(sections) if spec.path[: len(section.path)] == section.path)
        described = Text(spec.help)
        described.append(f" [{spec.expects}; default {default_in_words(spec.default)}]", style="dim")
        owner.add_row(Text(f"  {spec.option}", style="bold"), described)
    for section, table in sections:
        console.print(Text(f"{section.key}: {section.help}", style="bold underline"))
        console.print(table)
        console.print()
    written = console.file
    assert isinstance(written, io.StringIO)
    stream.write(_PADDING.sub("", written.getvalue()))


def default_in_words(default: Any) -> str:
    """A default as a user would write it."""
    if default is None:
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, dict | tuple | list) and not default:
        return "empty"
    return str(default) if str(default) else '""'
