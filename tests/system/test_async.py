"""The asynchronous loop from launch to summary: engines generate ahead of the trainer, within the bound.

Weights are taken in place. That requests are retracted for them is what every other job here does.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.system.jobs import ROOT, run, write_recipe

pytestmark = [pytest.mark.system, pytest.mark.timeout(450)]

TRAIN_ASYNC = ROOT / "entrypoints" / "train_async.py"


def test_engines_generate_ahead_and_every_group_is_accounted_for(
    tmp_path: Path, tiny_models: tuple[Path, Path], shared_engine: str
) -> None:
    recipe = write_recipe(tmp_path, tiny_models[0], steps=4, engine_url=shared_engine)
    options = ("--rollout.max_staleness", "1", "--rollout.max_new_tokens", "160", "--rollout.ignore_eos")
    options += ("--weights.on_update", "in_place")
    code, output, started = run(recipe, *options, timeout_s=400, entry=TRAIN_ASYNC)
    assert code == 0, output

    lines = [json.loads(line) for line in (started.run_dir / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "train/loss" in line]
    assert [line["step"] for line in trained] == [1, 2, 3, 4]
    stalest = [line["rollout/staleness_max"] for line in trained]
    assert stalest[0] == 0 and stalest[1] == 1 and max(stalest) == 1
    for line in trained:
        assert line["rollout/staleness_mean"] <= line["rollout/staleness_max"]
        assert line["rollout/samples"] == 16 and line["train/trained_tokens"] > 0
    assert trained[0]["train/logprob_diff_mean"] < 1e-4
    assert any(line["rollout/staleness_mean"] % 1 for line in trained), "no response lived through an update"

    events = started.events()
    admitted = [event["group_id"] for event in events if event["kind"] == "group_admitted"]
    ended = [group for event in events if event["kind"] == "groups_trained" for group in event["group_ids"]]
    assert len(admitted) == 16 and Counter(ended) == Counter(admitted), "no group too many, none lost, none twice"
    order = [event["kind"] for event in events]
    first_trained = order.index("groups_trained")
    assert order[:first_trained].count("group_admitted") == 8, "two batches were on their way before the first was done"
    published = [event["version"] for event in events if event["kind"] == "weights_published"]
    assert published == ["0.0", "0.1", "0.2", "0.3", "0.4"]
    summary = json.loads((started.run_dir / "summary.json").read_text())
    assert summary["outcome"] == "finished" and {"wait", "train", "publish"} <= summary["time_split"].keys()
