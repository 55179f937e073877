"""Files of records: JSON lines, a JSON list, CSV, parquet; all but parquet also compressed with gzip.

Invariant: every defect of a file is one DataError that names the file and the line, or the record.
"""

from __future__ import annotations

import csv
import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from asyncrl.data.fields import Record
from asyncrl.errors import DataError

SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")
"""Names of files that can be read end with one of these; in a directory an earlier one is preferred."""
FORMATS = ".jsonl, .json, .csv, each also .gz, or .parquet"
"""The same, for messages."""
_BOM = b"\xef\xbb\xbf"


def file_format(path: Path) -> str | None:
    """The one of SUFFIXES that says how to read `path`; None for any other file."""
    name = path.name.removesuffix(".gz")
    suffix = Path(name).suffix
    return suffix if suffix in SUFFIXES and (name == path.name or suffix != ".parquet") else None


def read_file(path: Path, name: str, where: str) -> Iterator[Record]:
    """Yields the records of a file that has a `file_format`.

    `name` begins the ids of the records, and `where` is the setting that named the file. Raises DataError, also while
    iterating.
    """
    suffix = file_format(path)
    if suffix == ".parquet":
        yield from _parquet(path, name, where)
        return
    try:
        with cast(IO[bytes], gzip.open(path)) if path.suffix == ".gz" else path.open("rb") as file:
            match suffix:
                case ".jsonl":
                    yield from _json_lines(file, path, name, where)
                case ".json":
                    yield from _json(file, path, name, where)
                case _:
                    yield from _csv(file, path, name, where)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{where}: {path} cannot be read ({error})") from error


def _json_lines(lines: IO[bytes], path: Path, name: str, where: str, hint: str = "") -> Iterator[Record]:
    decoder = msgspec.json.Decoder()
    for number, line in enumerate(lines, start=1):
        text = line.removeprefix(_BOM).strip()
        if not text:
            continue
        place = f"{path} line {number}"
        try:
            fields = decoder.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DataError(f"{where}: {place}: not valid JSON ({error}){hint}") from error
        yield Record(f"{name}:{number}", place, _object(fields, f"{where}: {place}"))


def _json(file: IO[bytes], path: Path, name: str, where: str) -> Iterator[Record]:
    """Reads a list of objects, or one object a line, as data sets of this suffix have either."""
    text = file.read().removeprefix(_BOM)
    if not text.lstrip().startswith(b"["):
        hint = "; a .json file holds a list of objects, or one object a line"
        yield from _json_lines(io.BytesIO(text), path, name, where, hint)
        return
    try:
        rows = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{where}: {path}: not valid JSON ({error})") from error
    for number, fields in enumerate(rows):
        place = f"{path} record {number}"
        yield Record(f"{name}:{number}", place, _object(fields, f"{where}: {place}"))


def _object(fields: Any, where: str) -> dict[str, Any]:
    if not isinstance(fields, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(fields).__name__}")
    return fields


def _csv(file: IO[bytes], path: Path, name: str, where: str) -> Iterator[Record]:
    """Reads rows after a row of names. All values are text."""
    csv.field_size_limit(sys.maxsize)  # a prompt may be longer than 131,072 characters
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    rows = csv.reader(text, strict=True)
    number = 1
    try:
        names = next(rows, [])
        if len(set(names)) < len(names):
            raise DataError(f"{where}: {path} line 1: two columns have the same name ({', '.join(names)})")
        number = rows.line_num + 1
        for row in rows:
            place = f"{path} line {number}"  # the first line of a row that has several
            if row:
                if len(row) != len(names):
                    raise DataError(
                        f"{where}: {place}: {len(row)} values for the {len(names)} columns {', '.join(names)}"
                    )
                yield Record(f"{name}:{number}", place, dict(zip(names, row, strict=True)))
            number = rows.line_num + 1
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{where}: {path} line {number}: not valid CSV ({error})") from error


def _parquet(path: Path, name: str, where: str) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path)
        row = 0
        for batch in table.iter_batches(batch_size=1024):
            for fields in batch.to_pylist():
                yield Record(f"{name}:{row}", f"{path} row {row}", fields)
                row += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{where}: {path} cannot be read as parquet ({error})") from error
