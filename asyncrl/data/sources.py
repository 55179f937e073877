"""Sources of records: files, Hugging Face directories, generated tasks, the user's own function.

A source yields records one by one, each with a place for messages (`data/train.jsonl line 17`) and a stable id
(`train.jsonl:17`). This module knows nothing of prompts or tokens. Every defect of the data raises one DataError that
names the place. `where` is the setting that named the source (`data`, `eval.data`, `warmup`).
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from asyncrl.config.sections.data import DataConfig
from asyncrl.data.dotted_path import resolve_dotted_path
from asyncrl.data.fields import Record
from asyncrl.data.file_formats import FORMATS, SUFFIXES, file_format, read_file
from asyncrl.errors import ConfigError, DataError, counted

_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json")  # beside the records in directories from the hub
_MOST_WITHOUT_SIZE = 1_000_000  # records of a function; one that goes on is taken for one without end
_LOOK_EVERY = 1000  # records
_LEAST_MEMORY_BYTES = 1 << 30  # or a twentieth of a small machine's: below it the kernel soon kills some process
_HOW_TO_END = "; set {where}.size to the number of records to take"
_GENERATED_SIZE = 1000  # records of a generated task if no size is set; reasoning-gym's own default is 500


@dataclass(slots=True)
class Progress:
    """How far the reading of a source is; other threads may look at it."""

    read: int = 0
    """Records that the source has yielded."""
    ready: int = 0
    """Records that have become prompts, or were left out."""


def read_records(config: DataConfig, *, where: str = "data", progress: Progress | None = None) -> Iterator[Record]:
    """Yields the records of the source in `config`, at most `config.size`; counts them in `progress`.

    Raises ConfigError without a source, and DataError for a source that cannot be read, has no end or does not fit into
    memory; also while iterating.
    """
    source = config.source
    if not source:
        raise ConfigError(
            f"{where}.source is not set; give a file ({FORMATS}), a dataset directory, reasoning_gym:TASK or "
            "package.module:function"
        )
    path = Path(source)
    is_function = False
    if source.startswith("reasoning_gym:"):
        records = _reasoning_gym(config, where)
    elif path.is_dir():
        records = _directory(path, config, where)
    elif file_format(path) is not None:
        records = _file(path, path.name, where)
    elif ":" in source and "/" not in source:
        records, is_function = _function(config, where), True
    elif path.exists():
        raise DataError(f"{where}.source: {source} is neither a directory nor a file of a known format ({FORMATS})")
    else:
        raise DataError(f"{where}.source: {source} does not exist (relative to {Path.cwd()})")
    counted = _counted(itertools.islice(records, config.size), progress or Progress(), config, where)
    if config.size is None and is_function:
        return iter(list(counted))  # before anything is made of them: a source without end is soon found
    return counted


def _counted(records: Iterable[Record], progress: Progress, config: DataConfig, where: str) -> Iterator[Record]:
    """Counts the records, and ends what would take all memory."""
    for record in records:
        progress.read += 1
        if progress.read % _LOOK_EVERY == 0 and _memory_is_short():
            raise DataError(
                f"{where}.source: {config.source} does not fit into memory, which is short after {progress.read:,} "
                f"records{'' if config.size else _HOW_TO_END.format(where=where)}"
            )
        yield record


def _memory_is_short() -> bool:
    memory = psutil.virtual_memory()
    return bool(memory.available < min(_LEAST_MEMORY_BYTES, memory.total / 20))


def _file(path: Path, name: str, where: str) -> Iterator[Record]:
    if not path.is_file():
        raise DataError(f"{where}.source: {path} does not exist (relative to {Path.cwd()})")
    return read_file(path, name, where)


def _directory(path: Path, config: DataConfig, where: str) -> Iterator[Record]:
    """Reads a dataset saved with `save_to_disk`, or all files of one format in any directory."""
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _saved_dataset(path, config.split, where)
    found = sorted(file for file in path.rglob("*") if file.is_file() and file.name not in _DESCRIPTIONS)
    for suffix in SUFFIXES:
        files = [file for file in found if file_format(file) == suffix]
        if files:
            chosen = _files_of_split(path, files, config.split, where)
            return itertools.chain.from_iterable(_file(f, str(f.relative_to(path)), where) for f in chosen)
    raise DataError(f"{where}.source: {path} holds no saved dataset and no file of a known format ({FORMATS})")


def _files_of_split(path: Path, files: list[Path], split: str | None, where: str) -> list[Path]:
    """Picks the files whose name or folder begins with the split: `train-00000-of-00001.parquet`, `train/0.parquet`.

    Without a split, picks `train`, or all files if none belongs to it.
    """

    def belongs(file: Path, name: str) -> bool:
        return any(
            part == name or part.startswith((f"{name}-", f"{name}.", f"{name}_"))
            for part in file.relative_to(path).parts
        )

    if split is not None:
        chosen = [f for f in files if belongs(f, split)]
        if not chosen:
            names = ", ".join(str(f.relative_to(path)) for f in files[:8])
            raise DataError(f"{where}.split: no file of {path} belongs to split {split!r} (found: {names})")
        return chosen
    return [f for f in files if belongs(f, "train")] or files


def _saved_dataset(path: Path, split: str | None, where: str) -> Iterator[Record]:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # datasets raises errors of many kinds for a damaged directory
        raise DataError(f"{where}.source: {path} is not a readable dataset directory ({error})") from error
    if isinstance(loaded, datasets.DatasetDict):
        name = split or ("train" if "train" in loaded else next(iter(loaded), None) if len(loaded) == 1 else None)
        if name not in loaded:
            raise DataError(
                f"{where}.split: {path} has the splits {', '.join(map(str, loaded))}; set {where}.split to one of them"
            )
        loaded = loaded[name]
    for row, fields in enumerate(loaded):
        yield Record(f"{path.name}:{row}", f"{path} row {row}", dict(fields))


def _reasoning_gym(config: DataConfig, where: str) -> Iterator[Record]:
    """Yields entries of a procedural task, with question and answer also under `prompt_key` and `answer_key`."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    task = config.source.removeprefix("reasoning_gym:")
    if task not in DATASETS:
        close = [name for name in DATASETS if task and (task in name or name in task)][:5]
        raise DataError(
            f"{where}.source: reasoning_gym has no task {task!r}"
            + (f"; did you mean {', '.join(close)}?" if close else "")
        )
    size = config.size or _GENERATED_SIZE
    try:
        dataset = reasoning_gym.create_dataset(task, **({"seed": config.seed, "size": size} | config.args))
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(f"{where}.args: reasoning_gym task {task!r} refused {config.args} ({error})") from error
    for index in range(len(dataset)):
        entry = dataset[index]
        fields = {**entry, config.prompt_key: entry["question"]}
        if config.answer_key is not None:
            fields[config.answer_key] = entry["answer"]
        yield Record(f"{task}:{index}", f"{config.source} entry {index}", fields)


def _function(config: DataConfig, where: str) -> Iterator[Record]:
    """Calls the user's function with `args`, and with `seed` and `size` if it has parameters of these names."""
    function = resolve_dotted_path(config.source, setting=f"{where}.source", error=DataError)
    parameters = inspect.signature(function).parameters
    offered = {"seed": config.seed} | ({"size": config.size} if config.size is not None else {})
    kwargs = {name: value for name, value in offered.items() if name in parameters} | config.args
    number = 0
    try:
        for fields in function(**kwargs):
            if not isinstance(fields, dict):
                raise DataError(
                    f"{where}: {config.source} record {number}: expected a dict, found {type(fields).__name__}"
                )
            if config.size is None and number == _MOST_WITHOUT_SIZE:
                raise DataError(
                    f"{where}.source: {config.source} has yielded {number:,} records and goes on; a source is read to "
                    f"its end before the first step{_HOW_TO_END.format(where=where)}"
                )
            yield Record(f"{config.source}:{number}", f"{config.source} record {number}", fields)
            number += 1
    except DataError:
        raise
    except Exception as error:  # the user's function may raise anything
        raise DataError(
            f"{where}: {config.source} failed after {counted(number, 'record')} ({type(error).__name__}: {error})"
        ) from error
