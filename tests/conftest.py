"""What holds for all tests: quick ones run first, whole jobs and real engines last."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A broken function is told in seconds, not after the engines have started."""
    items.sort(key=lambda item: item.get_closest_marker("system") is not None)
