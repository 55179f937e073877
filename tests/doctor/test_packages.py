"""What the doctor says of installed packages and of trackers."""

from __future__ import annotations

import pytest

from asyncrl.config.sections.shown import TrackConfig
from asyncrl.doctor.packages import lock, packages, python, trackers

ASKED = ["sglang==0.5.23", "anyio>=4.16", "rich", "smg==1.13.0; extra == 'smg'"]
HERE = {"sglang": "0.5.23", "anyio": "4.16.0", "rich": "15.0.0"}


def test_packages_are_held_against_what_the_project_asks_for() -> None:
    assert packages(ASKED, HERE.get).seen == "sglang 0.5.23"  # what an extra asks for may be missing
    wrong = packages(ASKED, {**HERE, "sglang": "0.5.22", "rich": None}.get)
    assert wrong.level == "failed" and "sglang is 0.5.22, not ==0.5.23, rich is missing" in wrong.seen
    assert python("3.11.7", ">=3.11,<3.13").level == "ok" and python("3.13.0", ">=3.11,<3.13").level == "failed"


def test_versions_that_were_never_tested_together_are_told() -> None:
    lines = ["# made by", "rich==15.0.0", *(f"p{i}==1" for i in range(7)), "local @ file:///x"]
    assert lock(lines[:2], HERE.get).seen == "all 1 packages as tested"
    found = lock(lines, HERE.get)
    assert found.level == "warning" and "7 of 8" in found.seen and "p0 missing (tested: 1)" in found.seen
    assert "and 2 more" in found.seen and "p6" not in found.seen


@pytest.mark.parametrize(
    ("args", "environ", "hosts", "level"),
    [
        ({}, {}, [], "warning"),
        ({"mode": "offline"}, {}, [], "ok"),
        ({}, {"WANDB_MODE": "offline"}, [], "ok"),
        ({}, {"WANDB_API_KEY": "x"}, [], "ok"),
        ({}, {}, ["api.wandb.ai"], "ok"),
        ({}, {"WANDB_BASE_URL": "https://wandb.us:8080"}, ["api.wandb.ai"], "warning"),
    ],
)
def test_wandb_needs_a_key_unless_it_is_offline(
    args: dict[str, str], environ: dict[str, str], hosts: list[str], level: str
) -> None:
    [found] = trackers(TrackConfig(to=("wandb",), args={"wandb": args}), environ, hosts)
    assert found.level == level and ("wandb login" in found.mend) == (level == "warning")


def test_other_trackers_need_no_account() -> None:
    assert [f.level for f in trackers(TrackConfig(to=("tensorboard", "trackio")), {}, [])] == ["ok", "ok"]
