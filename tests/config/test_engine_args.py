"""Server arguments are checked against the engine's own list."""

from __future__ import annotations

import pytest

from asyncrl.config.checks.engine_args import RESERVED, engine_arguments, server_arg_problems


def problem(name: str, value: object) -> str | None:
    found = list(server_arg_problems({name: value}))
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
        ("lora_target_modules", "all"),
        ("lora_target_modules", ["q_proj", "k_proj"]),
        ("modelopt_quant", {"quant_cfg": "fp8"}),
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
        ("cuda_graph_bs_decode", [1, "x"], "expects a list, each item a whole number"),
        ("lora_target_modules", "none_such", "expects one of q_proj, k_proj"),
        ("fuseep_mode", True, "expects one of 1, 2"),
        ("stat_loggers", 1, "no such server argument"),
        ("config", "engine.yaml", "write its settings into this table"),
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
