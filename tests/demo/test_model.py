"""The demo's policy: the builder writes a Hugging Face model that other programs can load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.demo import model, task


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "model"
    model.build(path)
    return path


def test_building_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from asyncrl.demo.model import build; build(pathlib.Path(sys.argv[1]));"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "model")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_two_builds_are_the_same_byte_for_byte(policy: Path, tmp_path: Path) -> None:
    model.build(tmp_path / "deep" / "model")
    files = sorted(file.name for file in policy.iterdir())
    assert sorted(file.name for file in (tmp_path / "deep" / "model").iterdir()) == files
    for name in files:
        assert (policy / name).read_bytes() == (tmp_path / "deep" / "model" / name).read_bytes()


def test_a_build_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(model, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        model.build(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_transformers_loads_every_weight_and_nothing_else(policy: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    loaded, info = AutoModelForCausalLM.from_pretrained(policy, output_loading_info=True)
    assert not any(info.values())
    assert loaded.dtype == torch.float32
    assert 1e6 < sum(parameter.numel() for parameter in loaded.parameters()) < 5e6
    with torch.no_grad():
        log_probs = loaded(torch.arange(3, 40)[None]).logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    assert (entropy > 4).all()  # an untrained model: close to ln 128 = 4.85


def test_one_token_per_character_and_back(policy: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(policy)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (model.PAD_ID, model.EOS_ID)
    text = model.CHARACTERS + task.prompt("ehcbk") + "  two  spaces\n\n"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    assert tokenizer("é")["input_ids"] == [model.UNK_ID]
    assert max(ids) < json.loads((policy / "config.json").read_text())["vocab_size"]
