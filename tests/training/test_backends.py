"""Backends by name, and the door through which the driver asks what one can train."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from asyncrl.config import Config
from asyncrl.config.sections.training import TrainConfig
from asyncrl.errors import ConfigError, ModelError
from asyncrl.training.backends import BACKENDS, check_trainable
from tests.config.test_architecture import QWEN3, write


def config_of(path: Path, **train: Any) -> Config:
    return Config.model_validate({"model": {"path": path}, "train": train})


def test_the_configuration_names_every_backend_and_no_other() -> None:
    assert set(get_args(TrainConfig.model_fields["backend"].annotation)) == BACKENDS.keys()


def test_what_a_backend_cannot_train_is_refused_before_anything_starts(tmp_path: Path) -> None:
    path = write(tmp_path, QWEN3)
    check_trainable(config_of(path, tensor_parallel=2))
    with pytest.raises(ConfigError, match=r"train\.tensor_parallel = 3 does not divide the model's"):
        check_trainable(config_of(path, tensor_parallel=3))
    with pytest.raises(ModelError, match='model_type "bert" cannot be trained'):
        check_trainable(config_of(write(tmp_path, {**QWEN3, "model_type": "bert"})))


def test_to_ask_costs_no_import_of_torch() -> None:
    program = "import sys, asyncrl.training.backends; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
