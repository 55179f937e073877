"""Which engines of somebody else's can work in a job, and how the layout shows them."""

from __future__ import annotations

import pytest

from asyncrl.config.layout import Gpu
from asyncrl.config.machine import Machine
from asyncrl.config.placement.rules import plan_layout
from asyncrl.config.reading.report import dry_run_report
from tests.config.conftest import Load, Refused

URL = "http://127.0.0.1:30000"


def test_external_engines_replace_those_that_would_be_started_unless_some_are_asked_for(load: Load) -> None:
    alone = load(f"--engine.external={URL}")
    assert alone.layout.engines == ()
    assert [(e.engine_id, e.url, e.transport) for e in alone.layout.external] == [("external-0", URL, "broadcast")]
    assert alone.layout.transports == {"broadcast"}
    assert len(load(f"--engine.external={URL}/", "--engine.num-engines", "2").layout.engines) == 2
    report = dry_run_report(alone)
    assert "#   external-0   http://127.0.0.1:30000, not started here, weights by broadcast" in report


def test_on_gpus_external_engines_leave_those_of_this_job_unused(load: Load) -> None:
    config = load(f"--engine.external={URL}").config
    layout = plan_layout(config, Machine(gpus=("0", "1")))
    assert (layout.engines, layout.unused_gpus, layout.colocated) == ((), (Gpu(0, 1),), False)


@pytest.mark.parametrize(
    "url",
    [
        *("127.0.0.1:30000", "http://127.0.0.1", "https://127.0.0.1:30000", "http://:30000", f"{URL}/generate", ""),
        *("http://a:x", "http://user:word@127.0.0.1:30000", "http://127.0.0.1:30000?x=1"),
    ],
)
def test_what_is_no_address_is_refused(refused: Refused, url: str) -> None:
    assert "write http://host:port" in refused(f"--engine.external={url}")["engine.external"]


def test_an_engine_is_named_once(refused: Refused) -> None:
    assert "twice" in refused(f"--engine.external=[{URL!r}, '{URL}/']")["engine.external"]


def test_localhost_and_its_address_are_one_engine(refused: Refused, load: Load) -> None:
    assert "twice" in refused(f"--engine.external=[{URL!r}, 'http://LocalHost:30000']")["engine.external"]
    assert load("--engine.external=http://localhost:30000").layout.external[0].url == URL


@pytest.mark.parametrize("option", [("--engine.colocate",), ("--weights.transport", "tensor")])
def test_weights_cannot_be_handed_over_in_place(refused: Refused, option: tuple[str, ...]) -> None:
    assert "handed over in place" in refused(f"--engine.external={URL}", *option)["engine.external"]


def test_an_engine_on_another_machine_needs_weights_on_a_shared_directory(refused: Refused, load: Load) -> None:
    away = "--engine.external=http://10.0.0.7:30000"
    assert "broadcast on loopback only" in refused(away)["engine.external"]
    assert "broadcast on loopback only" in refused(away, "--weights.transport", "disk")["engine.external"]
    loaded = load(away, "--weights.transport", "disk", "--weights.directory", "/shared")
    assert loaded.layout.external[0].transport == "disk"
