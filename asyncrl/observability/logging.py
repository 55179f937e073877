"""Logging of a job's processes: people read the terminal, programs read `<run>/logs/driver.jsonl`.

Invariants
- Messages from structlog, the standard library's logging and `warnings` look the same, with rank and component.
- A JSON line is in the file when the logging call returns. A thread writes to the terminal; no caller waits for it.
- Warnings of libraries about packages that this project does not use (Transformer Engine, Apex) appear in neither.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import structlog

from asyncrl.errors import RunDirectoryError
from asyncrl.observability.line_file import LineFile, encode_line
from asyncrl.observability.terminal import TerminalWriter

QUIET_LOGGERS: Mapping[str, int] = {
    "aiohttp.access": logging.WARNING,
    "asyncio": logging.WARNING,
    "datasets": logging.WARNING,
    "filelock": logging.WARNING,
    "fsspec": logging.WARNING,
    "httpcore": logging.WARNING,
    "httpx": logging.WARNING,
    "matplotlib": logging.WARNING,
    "megatron": logging.WARNING,
    "numexpr": logging.WARNING,
    "PIL": logging.WARNING,
    "torch": logging.WARNING,
    "torch.utils.cpp_extension": logging.ERROR,  # "No CUDA runtime is found", on every machine without one
    "transformers": logging.ERROR,
    "urllib3": logging.WARNING,
}
"""Lowest level at which each of these libraries may log; below it they log too much."""

QUIET_WARNINGS: tuple[tuple[str, str], ...] = (
    (r".*(Transformer Engine|Apex|apex|transformer_engine|TransformerEngine).*", r"megatron\."),
)
"""Warnings to ignore, as (message pattern, module pattern)."""

_COLORS = {"warning": "\x1b[33m", "error": "\x1b[31m", "critical": "\x1b[31;1m", "debug": "\x1b[2m"}
_RESET, _DIM = "\x1b[0m", "\x1b[2m"


def get_logger(component: str) -> structlog.stdlib.BoundLogger:
    """Returns a logger that adds `component` to its lines: `driver`, `controller`, `engine-0`, ..."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(f"asyncrl.{component}", component=component)
    return logger


def quiet_libraries() -> None:
    """Silences messages that libraries log on import; call it before importing torch or megatron."""
    for name, level in QUIET_LOGGERS.items():
        logging.getLogger(name).setLevel(level)
    for message, module in QUIET_WARNINGS:
        warnings.filterwarnings("ignore", message=message, module=module)


def human_line(record: Mapping[str, Any], *, color: bool) -> str:
    """Formats a log record: `17:13:42 driver: router is up  port=31000`. Names level and rank only if unusual."""
    shown = dict(record)
    level = shown.pop("level", "info")
    clock = time.strftime("%H:%M:%S", time.localtime(shown.pop("time", None)))
    rank = shown.pop("rank", 0)
    who = str(shown.pop("component", None) or shown.get("logger", "job"))
    shown.pop("logger", None)
    exception = shown.pop("exception", None)
    event = shown.pop("event", "")
    who += f" (rank {rank})" if rank else ""
    prefix = f"{clock} {who}: "
    if level not in ("info", "debug"):
        prefix += f"{level}: "
    fields = "  ".join(f"{key}={value}" for key, value in shown.items())
    text = f"{prefix}{event}" + (f"  {fields}" if fields else "")
    if color and level in _COLORS:
        text = f"{_COLORS[level]}{text}{_RESET}"
    elif color:
        text = f"{_DIM}{prefix}{_RESET}{event}" + (f"  {_DIM}{fields}{_RESET}" if fields else "")
    return text + (f"\n{exception}" if exception else "") + "\n"


class _RecordHandler(logging.Handler):
    """Base of our handlers: turns a standard log record into a flat mapping."""

    def __init__(self, rank: int, component: str) -> None:
        super().__init__()
        self._identity = {"rank": rank, "component": component}

    def record(self, record: logging.LogRecord) -> dict[str, Any]:
        fields: dict[str, Any] = {"time": record.created, "level": record.levelname.lower(), "logger": record.name}
        fields |= self._identity
        if isinstance(record.msg, dict):  # from structlog, see `_as_record`
            fields |= record.msg
        else:
            if not record.name.startswith("asyncrl"):
                fields["component"] = record.name
            fields["event"] = record.getMessage().rstrip()
        if record.exc_info and "exception" not in fields:
            fields["exception"] = logging.Formatter().formatException(record.exc_info)
        return fields


class _FileHandler(_RecordHandler):
    def __init__(self, file: LineFile, rank: int, component: str) -> None:
        super().__init__(rank, component)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._file.append(encode_line(self.record(record)))
        except Exception:  # a record with wrong arguments must not end the job; `handleError` is logging's own report
            self.handleError(record)


class _TerminalHandler(_RecordHandler):
    def __init__(self, writer: TerminalWriter, color: bool, rank: int, component: str) -> None:
        super().__init__(rank, component)
        self._writer = writer
        self._color = color

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._writer.write(human_line(self.record(record), color=self._color))
        except Exception:  # as above
            self.handleError(record)


class _ForwardingHandler(_RecordHandler):
    def __init__(self, send: Callable[[dict[str, Any]], bool], otherwise: Sequence[logging.Handler], rank: int) -> None:
        super().__init__(rank, "driver")
        self._send = send
        self._otherwise = otherwise

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if not self._send(self.record(record)):
                for handler in self._otherwise:
                    handler.handle(record)
        except Exception:  # as above
            self.handleError(record)


@contextmanager
def forwarded(send: Callable[[dict[str, Any]], bool], *, rank: int) -> Iterator[None]:
    """Passes warnings and errors to `send` instead of the terminal, which belongs to rank 0 and its live table.

    If `send` returns False, rank 0 no longer takes them, and they go to the terminal.
    """
    root = logging.getLogger()
    before = root.handlers[:]
    terminals = [handler for handler in before if isinstance(handler, _TerminalHandler)]
    forwarding = _ForwardingHandler(send, terminals, rank)
    forwarding.setLevel(logging.WARNING)
    root.handlers[:] = [*(handler for handler in before if handler not in terminals), forwarding]
    try:
        yield
    finally:
        root.handlers[:] = before


def _as_record(
    _logger: object, _method: str, event_dict: MutableMapping[str, Any]
) -> tuple[tuple[MutableMapping[str, Any]], dict[str, Any]]:
    """Last processor of structlog: makes the mapping the message of a standard log record."""
    return (event_dict,), {}


@contextmanager
def logging_to(
    run_dir: Path | None,
    *,
    rank: int = 0,
    component: str = "driver",
    level: str = "INFO",
    stream: TextIO | None = None,
) -> Iterator[TerminalWriter]:
    """Sets up logging of this process while the context is entered; yields the terminal's writer, for `flush`.

    JSON lines go to `<run_dir>/logs/driver.jsonl` (`rank-N.jsonl` for other ranks). Ranks other than 0 show only
    warnings and errors on the terminal. Without a `stream`, each line goes to the current `sys.stderr`: a live display
    redirects it to show lines above its table.

    Raises RunDirectoryError when the log file cannot be opened.
    """
    file = None
    if run_dir is not None:
        logs = run_dir / "logs"
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirectoryError(
                f"{logs}: cannot be created ({error.strerror}); make its parent writable or set run.dir"
            ) from error
        file = LineFile(logs / ("driver.jsonl" if rank == 0 else f"rank-{rank}.jsonl"))
    writer = TerminalWriter(lambda: stream or sys.stderr)
    color = (stream or sys.stderr).isatty() and "NO_COLOR" not in os.environ
    terminal = _TerminalHandler(writer, color, rank, component)
    terminal.setLevel(level if rank == 0 else logging.WARNING)
    handlers: list[logging.Handler] = [terminal]
    if file is not None:
        handlers.append(_FileHandler(file, rank, component))

    root = logging.getLogger()
    before, level_before = root.handlers[:], root.level
    structlog_before = structlog.get_config()
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.filter_by_level,
            structlog.processors.format_exc_info,
            _as_record,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    quiet_libraries()
    logging.captureWarnings(True)
    try:
        yield writer
    finally:
        logging.captureWarnings(False)
        structlog.configure(**structlog_before)
        root.handlers[:] = before
        root.setLevel(level_before)
        writer.close()
        if file is not None:
            file.close()
