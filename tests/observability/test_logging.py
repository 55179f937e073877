from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import structlog
from blockbuster import BlockBuster

from asyncrl.errors import RunDirectoryError
from asyncrl.observability.logging import forwarded, get_logger, human_line, logging_to
from asyncrl.observability.terminal import TerminalWriter


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_people_and_programs_get_the_same_event(tmp_path: Path) -> None:
    terminal = io.StringIO()
    with logging_to(tmp_path, stream=terminal):
        get_logger("controller").info("router is up", port=31000)
    (line,) = lines_of(tmp_path / "logs" / "driver.jsonl")
    assert line.pop("time") > 1.7e9
    assert line == {
        "level": "info", "logger": "asyncrl.controller", "rank": 0,
        "component": "controller", "event": "router is up", "port": 31000,
    }  # fmt: skip
    assert terminal.getvalue()[8:] == " controller: router is up  port=31000\n"


def test_what_is_forwarded_comes_to_the_terminal_only_where_nobody_takes_it() -> None:
    taken: list[dict[str, Any]] = []
    terminal, takes = io.StringIO(), True

    def send(record: dict[str, Any]) -> bool:
        taken.append(record)
        return takes

    with logging_to(None, rank=3, stream=terminal) as writer, forwarded(send, rank=3):
        log = get_logger("trainer")
        log.info("of no interest")
        log.warning("odd", step=4)
        takes = False
        log.error("lost")
        writer.flush(5.0)
    assert [(record["rank"], record["level"], record["event"]) for record in taken] == [
        (3, "warning", "odd"),
        (3, "error", "lost"),
    ]
    assert taken[0]["step"] == 4
    assert terminal.getvalue()[8:] == " trainer (rank 3): error: lost\n"


def test_the_standard_library_and_warnings_are_routed_in(tmp_path: Path) -> None:
    terminal = io.StringIO()
    with logging_to(tmp_path, stream=terminal), warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.getLogger("some.library").error("%d of %d", 1, 2)
        warnings.warn("beware", stacklevel=1)
    first, second = lines_of(tmp_path / "logs" / "driver.jsonl")
    assert (first["event"], first["component"], first["level"]) == ("1 of 2", "some.library", "error")
    assert "beware" in second["event"]
    assert "some.library: error: 1 of 2" in terminal.getvalue()


def test_an_exception_keeps_its_traceback_in_both(tmp_path: Path) -> None:
    terminal = io.StringIO()
    with logging_to(tmp_path, stream=terminal):
        for log in (get_logger("driver"), logging.getLogger("other")):
            try:
                _ = 1 / 0
            except ZeroDivisionError:
                log.exception("went wrong")
    for line in lines_of(tmp_path / "logs" / "driver.jsonl"):
        assert line["event"] == "went wrong"
        assert line["exception"].startswith("Traceback") and line["exception"].endswith(
            "ZeroDivisionError: division by zero"
        )
    assert terminal.getvalue().count("ZeroDivisionError: division by zero") == 2


def test_other_ranks_have_their_own_file_and_show_only_warnings(tmp_path: Path) -> None:
    terminal = io.StringIO()
    with logging_to(tmp_path, rank=2, component="trainer", stream=terminal):
        structlog.get_logger("asyncrl.step").info("quiet")
        structlog.get_logger("asyncrl.step").warning("loud")
    assert [line["event"] for line in lines_of(tmp_path / "logs" / "rank-2.jsonl")] == ["quiet", "loud"]
    assert terminal.getvalue()[8:] == " trainer (rank 2): warning: loud\n"


def test_lines_of_a_thread_bear_rank_and_component_too(tmp_path: Path) -> None:
    with logging_to(tmp_path, rank=1, component="trainer", stream=io.StringIO()):
        thread = threading.Thread(target=lambda: structlog.get_logger("asyncrl.step").info("from a thread"))
        thread.start()
        thread.join()
    (line,) = lines_of(tmp_path / "logs" / "rank-1.jsonl")
    assert (line["rank"], line["component"]) == (1, "trainer")


def test_a_record_with_broken_arguments_does_not_end_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with logging_to(tmp_path, stream=io.StringIO()):
        logging.getLogger("library").warning("%d apples", "three")
        logging.getLogger("library").warning("next")
    assert [line["event"] for line in lines_of(tmp_path / "logs" / "driver.jsonl")] == ["next"]
    assert "Logging error" in capsys.readouterr().err


def test_chatty_libraries_are_quiet(tmp_path: Path) -> None:
    with logging_to(tmp_path, level="DEBUG", stream=io.StringIO()):
        logging.getLogger("aiohttp.access").info("GET /")
        logging.getLogger("transformers.modeling_utils").warning("some weights")
        logging.getLogger("asyncrl.x").debug("ours")
    assert [line["event"] for line in lines_of(tmp_path / "logs" / "driver.jsonl")] == ["ours"]


def test_missing_parts_that_are_not_needed_are_not_warned_about() -> None:
    code = (
        "import sys, warnings; from asyncrl.observability.logging import quiet_libraries; quiet_libraries()\n"
        "def warn(module, text): warnings.warn_explicit(text, UserWarning, 'f.py', 1, module=module)\n"
        "warn('megatron.core.optimizer', 'Transformer Engine and Apex are not installed. Falling back')\n"
        "warn('megatron.core.models.backends', 'Apex is not installed. Falling back to Torch Norm')\n"
        "warn('megatron.core.other', 'something else'); warn('mine', 'Apex is mine')\n"
    )
    err = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    assert "Falling back" not in err
    assert "something else" in err and "Apex is mine" in err


def test_logging_imports_no_torch() -> None:
    code = "import sys, asyncrl.observability.logging, asyncrl.observability.display; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_was_set_up_before_is_there_again_afterwards(tmp_path: Path) -> None:
    before = logging.getLogger().handlers[:], logging.getLogger().level, structlog.get_config()
    with logging_to(tmp_path, stream=io.StringIO()):
        pass
    assert (logging.getLogger().handlers[:], logging.getLogger().level, structlog.get_config()) == before


def test_a_log_file_that_cannot_be_opened_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "logs" / "driver.jsonl").mkdir(parents=True)
    with pytest.raises(RunDirectoryError, match=r"driver.jsonl: cannot be written"), logging_to(tmp_path):
        pass
    with (
        pytest.raises(RunDirectoryError, match=r"logs: cannot be created \(Not a directory\)"),
        logging_to(Path(__file__)),
    ):
        pass


@pytest.mark.parametrize("color", [True, False])
def test_a_line_may_lack_any_field(color: bool) -> None:
    assert "job" in human_line({}, color=color)
    assert ("\x1b" in human_line({"level": "error", "event": "x"}, color=color)) == color


@pytest.mark.anyio
async def test_logging_does_not_block_the_event_loop(tmp_path: Path, no_blocking: BlockBuster) -> None:
    get_logger("driver").info("before")
    log = logging.getLogger("asyncrl.blocking")
    no_blocking.deactivate()
    with logging_to(tmp_path, stream=io.StringIO()):
        no_blocking.activate()
        log.warning("from the loop")
        get_logger("driver").info("from the loop too")
        no_blocking.deactivate()
    assert len(lines_of(tmp_path / "logs" / "driver.jsonl")) == 2


class SlowTerminal(io.StringIO):
    """A terminal whose user pressed Ctrl-S."""

    def __init__(self) -> None:
        super().__init__()
        self.resumed = threading.Event()

    def write(self, text: str) -> int:
        self.resumed.wait(10)
        return super().write(text)


def test_a_paused_terminal_costs_lines_and_says_so() -> None:
    terminal = SlowTerminal()
    writer = TerminalWriter(lambda: terminal)
    for i in range(12_000):
        writer.write(f"{i}\n")
    assert not writer.flush(0.01)
    terminal.resumed.set()
    assert writer.flush(10)
    writer.write("end\n")
    writer.close()
    lines = terminal.getvalue().splitlines()
    kept = [int(line) for line in lines if line.isdigit()]
    assert kept == list(range(len(kept))) and 10_000 <= len(kept) < 12_000
    assert f"... {12_000 - len(kept)} lines dropped: the terminal was too slow" in lines
    assert lines[-1] == "end" or lines[-2] == "end"


def test_a_closed_pipe_ends_the_output_not_the_job() -> None:
    terminal = io.StringIO()
    writer = TerminalWriter(lambda: terminal)
    terminal.close()
    writer.write("lost\n")
    assert writer.flush(5)
    writer.close()
    writer.close()


def test_a_terminal_without_utf8_shows_escapes() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    writer = TerminalWriter(lambda: stream)
    writer.write("0.4 → 0.9\n")
    writer.close()
    assert raw.getvalue() == b"0.4 \\u2192 0.9\n"
