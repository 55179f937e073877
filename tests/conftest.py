"""What holds for all tests: quick ones run first, whole jobs and real engines last; long ones leave their results."""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests import results

settings.register_profile(
    "any machine",
    deadline=None,
    derandomize=True,  # the same examples everywhere: a new one is found by whoever looks for it
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("any machine")

_long: dict[str, dict[str, object]] = {}
"""Test id → what came of it, of the long ones of this run."""


@pytest.fixture(autouse=True)
def same_interpreter() -> Iterator[None]:
    """A loop that begins in a test sets up the interpreter of all of them."""
    thresholds, switch_interval_s = gc.get_threshold(), sys.getswitchinterval()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    sys.setswitchinterval(switch_interval_s)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A broken function is told in seconds, not after the engines have started."""
    items.sort(key=lambda item: item.get_closest_marker("system") is not None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Long tests have limits of their own; the one that ends the whole run by force is made for quick ones."""
    if item.get_closest_marker("long") is not None:
        faulthandler.cancel_dump_traceback_later()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "long" not in report.keywords:
        return
    found = _long.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
    found["seconds"] = round(float(str(found["seconds"])) + report.duration, 1)
    if report.outcome != "passed":
        found["outcome"] = report.outcome


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Results of long tests are kept in the repository; a run of some of them changes those only."""
    if not _long or not os.environ.get(results.ASKED):
        return
    known = results.kept("test_long").get("tests", {})
    tests = dict(sorted((known | _long).items()))
    outcomes = [test["outcome"] for test in tests.values()]
    summary = {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
    results.keep("test_long", {"cores": os.cpu_count(), **summary, "tests": tests})
