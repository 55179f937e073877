"""Server arguments are checked against the installed engine's own list."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from asyncrl.config.checks.engine_args import RESERVED, engine_arguments, server_arg_problems


def problem(name: str, value: object) -> str | None:
    found = server_arg_problems({name: value})
    assert len(found) <= 1
    return found[0].text if found else None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chunked_prefill_size", 2048),
        ("disable_radix_cache", True),
        ("disable_radix_cache", False),
        ("mem_fraction_static", 0.5),
        ("mem_fraction_static", 1),
        ("schedule_policy", "lpm"),
        ("attention_backend", "torch_native"),
        ("json_model_override_args", {"a": 1}),
        ("json_model_override_args", '{"a": 1}'),
        ("cuda_graph_bs_decode", [1, 2]),
        ("max_prefill_tokens", "16k"),
        ("sampling_backend", "pytorch"),
        ("tool_call_parser", "auto"),
        ("fp8_gemm_backend", "auto"),
        ("enable_tf32_matmul", False),
    ],
)
def test_what_the_engine_takes_passes(name, value):
    assert problem(name, value) is None


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("chunked_prefil_size", 1, "did you mean engine.server_args.chunked_prefill_size?"),
        ("zzzzzzzz", 1, "SGLang has no such server argument"),
        ("chunked_prefill_size", "big", "expects a whole number"),
        ("chunked_prefill_size", True, "expects a whole number"),
        ("disable_radix_cache", "yes", "expects true or false"),
        ("mem_fraction_static", "x", "expects a number"),
        ("schedule_policy", "best", "one of lpm, random"),
        ("attention_backend", "foo", "one of triton, torch_native"),
        ("cuda_graph_bs_decode", 3, "expects a list"),
        ("stat_loggers", 1, "no such server argument"),
        ("model_path", "x", "use model.path"),
        ("tp_size", 2, "use engine.tensor_parallel"),
        ("tensor_parallel_size", 2, "use engine.tensor_parallel"),
        ("data_parallel_size", 2, "use engine.num_engines"),
        ("dtype", "auto", "use model.dtype"),
        ("port", 1, "picks free ports"),
    ],
)
def test_what_the_engine_or_the_job_cannot_take_is_refused(name, value, text):
    assert text in (problem(name, value) or "")


def test_every_reserved_name_is_an_argument_of_the_engine():
    assert set(RESERVED) <= set(engine_arguments())


def test_the_list_is_read_without_importing_the_engine():
    code = (
        "import sys; from asyncrl.config.checks.engine_args import engine_arguments; print(len(engine_arguments())); "
        "sys.exit('sglang' in sys.modules or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) > 400


@pytest.mark.system
def test_the_list_is_that_of_the_engines_own_parser():
    code = (
        "import argparse, json; from sglang.srt.server_args import ServerArgs; p = argparse.ArgumentParser(); "
        "ServerArgs.add_cli_args(p); "
        "options = [option for action in p._actions for option in action.option_strings if option.startswith('--')]; "
        "print(json.dumps([option[2:].replace('-', '_') for option in options]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=110)
    options = set(json.loads(done.stdout.splitlines()[-1]))
    named = set(engine_arguments()) | {alias for a in engine_arguments().values() for alias in a.aliases}
    assert named <= options
    negated = {f"no_{name}" for name, argument in engine_arguments().items() if argument.negatable}
    assert options - named - negated <= {"help", "config", "monokernel_backend"}
