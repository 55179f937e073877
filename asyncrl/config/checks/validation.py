"""Combinations of settings that cannot work, each with its reason. Pure functions. pydantic checks single fields.

A combination is refused if it would fail later, or would train on something else than the user asked for without a
word. A combination that is merely unwise is the user's choice.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path

from asyncrl.config.arguments.argument_list import unchecked_warning
from asyncrl.config.checks import engine_args, router_args
from asyncrl.config.checks.engine_args import server_arg_problems
from asyncrl.config.checks.external import external_problems, is_loopback
from asyncrl.config.checks.inputs import ModelFacts
from asyncrl.config.checks.named_code import BUILTIN_ALGORITHMS, BuiltinAlgorithm, function_problems
from asyncrl.config.checks.no_effect import settings_without_effect
from asyncrl.config.checks.router_args import router_problems
from asyncrl.config.checks.served import served_beside, served_problems
from asyncrl.config.checks.staleness import least_staleness
from asyncrl.config.concurrency import concurrency_of, files_for, most_requests, planned_engines
from asyncrl.config.machine import Machine
from asyncrl.config.problems import Problem
from asyncrl.config.root import Config
from asyncrl.config.sections.data import DataConfig
from asyncrl.errors import counted

_LEAST_TEMPERATURE = 1e-6  # SGLang samples greedily below it
_AGENT_GRACE_S = 30.0
"""From the signal that torchrun passes on to its ranks until it kills them."""


def config_problems(config: Config, machine: Machine, facts: ModelFacts | None) -> list[Problem]:
    """All problems of a config with valid fields, on this machine and with this model. None: the model is unknown."""
    return [
        *_sampling_problems(config),
        *_precision_problems(config),
        *_schedule_problems(config),
        *_staleness_problems(config),
        *_interval_problems(config),
        *_eval_problems(config),
        *_update_problems(config),
        *_batch_problems(config, machine),
        *_length_problems(config, facts),
        *_data_problems(config),
        *_parallel_problems(config, facts),
        *_host_problems(config, machine),
        *_debug_problems(config),
        *external_problems(config),
        *served_problems(config),
        *server_arg_problems(config.engine.server_args),
        *router_problems(config.router),
    ]


def config_warnings(config: Config) -> Iterator[str]:
    """What a user should know about a configuration that works."""
    served = {section: settings.server_args for section, settings in served_beside(config).values()}
    server_args = {"engine": config.engine.server_args} | served
    passed_on = {
        engine_args.PACKAGE: [f"{section}.server_args" for section, given in server_args.items() if given],
        config.router.package: [router_args.PREFIX] if config.router.args else [],
    }
    for package, keys in passed_on.items():
        if keys and (warning := unchecked_warning(keys, package)) is not None:
            yield warning
    yield from settings_without_effect(config)


def _sampling_problems(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    if rollout.temperature == 0:
        yield Problem(
            "rollout.temperature",
            "0 (greedy) cannot train: log-probs at temperature 0 are undefined and a group's samples would all be the "
            "same; use 1.0 (eval.temperature may be 0)",
        )
    if rollout.top_p != 1:
        yield Problem(
            "rollout.top_p",
            f"{rollout.top_p:g} cannot train: the engine's log-probs are not renormalised for top-p, so trainer and "
            "engine would disagree on what was sampled; use 1",
        )
    if rollout.top_k != -1:
        yield Problem(
            "rollout.top_k",
            f"{rollout.top_k} cannot train: the engine's log-probs are not renormalised for top-k, so trainer and "
            "engine would disagree on what was sampled; use -1 (off)",
        )
    needed = BUILTIN_ALGORITHMS.get(config.train.algorithm, BuiltinAlgorithm()).group_samples
    if rollout.samples_per_prompt < needed:
        yield Problem(
            "rollout.samples_per_prompt",
            f"{rollout.samples_per_prompt} leaves {config.train.algorithm} nothing to compare: every advantage would "
            f"be 0; use at least {needed}",
        )
    if "" in rollout.stop:
        yield Problem("rollout.stop", "an empty string would end every response at once; take it out")
    if rollout.ignore_eos and rollout.stop:
        yield Problem(
            "rollout.ignore_eos", "the engine then ignores stop strings too; take out rollout.stop or ignore_eos"
        )


def _precision_problems(config: Config) -> Iterator[Problem]:
    """Numbers that are something else in the precision in which they are used."""
    if 0 < config.rollout.temperature < _LEAST_TEMPERATURE:
        yield Problem(
            "rollout.temperature",
            f"{config.rollout.temperature:g} is taken for 0 (greedy) by the engine, while the trainer would divide by "
            f"it; use at least {_LEAST_TEMPERATURE:g}",
        )
    train = config.train
    used = {f"train.{key}": getattr(train, key) for key in ("lr", "weight_decay", "adam_eps", "grad_clip")}
    of_algorithm = {f"algorithm.{key}": value for key, value in config.algorithm if isinstance(value, float)}
    for key, value in {**used, "warmup.lr": config.warmup.lr, **of_algorithm}.items():
        held = _as_float32(value)
        if math.isinf(held) or (held == 0) != (value == 0):
            yield Problem(key, f"{value:g} is {held:g} in float32, in which training computes; use another value")
    for key in ("adam_beta1", "adam_beta2"):
        if _as_float32(getattr(train, key)) == 1:
            yield Problem(
                f"train.{key}", f"{getattr(train, key)} is 1 in float32: the average would never move; use less"
            )


def _as_float32(value: float) -> float:
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.inf


def _schedule_problems(config: Config) -> Iterator[Problem]:
    if config.train.lr_decay != "constant" and config.train.num_steps is None:
        yield Problem(
            "train.lr_decay",
            f"{config.train.lr_decay} needs to know the length of the run before it begins; set train.num_steps, or "
            "use constant",
        )


def _eval_problems(config: Config) -> Iterator[Problem]:
    evaluation = config.eval
    if evaluation.beside and config.weights.keep_published == "never":
        yield Problem(
            "weights.keep_published",
            "never leaves evaluations beside the loop nothing to evaluate: they read the copy; use auto or always",
        )
    if evaluation.function is None:
        if evaluation.function_args:
            yield Problem("eval.function_args", "has no function to go to; set eval.function")
        return
    yield from function_problems("eval.function", evaluation.function)
    for key, other in (("eval.data", evaluation.data), ("eval.fleet", evaluation.fleet)):
        if other is not None:
            yield Problem("eval.function", f"evaluates in the place of {key}; take one of the two out")


def _staleness_problems(config: Config) -> Iterator[Problem]:
    asked, least, train = config.rollout.max_staleness, least_staleness(config), config.train
    interval, steps = train.update_weights_interval, train.optimizer_steps_per_batch
    if asked is not None and asked < least:
        yield Problem(
            "rollout.max_staleness",
            f"{asked} cannot be kept: with {train.minibatches} * {train.batch_epochs} = "
            f"{counted(steps, 'optimizer step')} for each batch (train.minibatches * train.batch_epochs) and "
            f"{counted(interval, 'batch', 'batches')} for each publication (train.update_weights_interval), the last "
            f"step before a publication is {steps} * {interval} - 1 = {counted(least, 'step')} ahead of the newest "
            f"weights to sample from; use at least {least}",
        )


def _interval_problems(config: Config) -> Iterator[Problem]:
    every, interval = config.eval.every, config.train.update_weights_interval
    if config.eval.enabled and every is not None and every % interval:
        yield Problem(
            "eval.every",
            f"{every} is no multiple of {interval} (train.update_weights_interval): what is evaluated are the "
            f"published weights, which would be older than the step; use {every + interval - every % interval}",
        )


def _update_problems(config: Config) -> Iterator[Problem]:
    speculative = config.engine.server_args.get("speculative_algorithm")
    if config.weights.on_update == "in_place" and speculative is not None:
        yield Problem(
            "weights.on_update",
            "in_place leaves the decoding step that is in flight to end under new weights, and with "
            f"engine.server_args.speculative_algorithm = {speculative} it makes an unknown number of tokens, whose "
            "weights could not be told; use retract",
        )


def _batch_problems(config: Config, machine: Machine) -> Iterator[Problem]:
    prompts, minibatches = config.rollout.prompts_per_step, config.train.minibatches
    if machine.world_size % config.train.tensor_parallel:
        return  # the layout's own problem says so; there is no data-parallel size to divide by
    copies = machine.world_size // config.train.tensor_parallel
    if prompts % (minibatches * copies):
        unit = minibatches * copies
        below, above = prompts - prompts % unit, prompts - prompts % unit + unit
        yield Problem(
            "rollout.prompts_per_step",
            f"{counted(prompts, 'prompt')} cannot be split evenly among "
            f"{counted(minibatches, 'minibatch', 'minibatches')} (train.minibatches) and "
            f"{counted(copies, 'data-parallel copy', 'data-parallel copies')} of the model "
            f"({counted(machine.world_size, 'rank')} / "
            f"train.tensor_parallel {config.train.tensor_parallel}); use {f'{below} or ' if below else ''}{above}",
        )
    if config.train.num_steps is None and config.data.size is not None and config.data.size < prompts:
        yield Problem(
            "data.size",
            f"{counted(config.data.size, 'prompt')} cannot fill one batch of {prompts} (rollout.prompts_per_step), so "
            "an epoch would have no step; raise it, or set train.num_steps",
        )


def _length_problems(config: Config, facts: ModelFacts | None) -> Iterator[Problem]:
    own = facts.context_length if facts is not None else None
    asked = config.model.context_length
    if own is not None and asked is not None and asked > own:
        yield Problem(
            "model.context_length", f"{asked} is over the model's own limit of {own} tokens; use at most that"
        )
    context = min((limit for limit in (own, asked) if limit is not None), default=None)
    response = config.rollout.max_new_tokens
    responses = [("rollout.max_new_tokens", response)]
    if config.eval.max_new_tokens is not None:
        responses.append(("eval.max_new_tokens", config.eval.max_new_tokens))
    for key, length in responses:
        if context is not None and length >= context:
            yield Problem(
                key,
                f"responses of {counted(length, 'token')} leave no room for a prompt in a context of {context} tokens; "
                f"use less than {context}",
            )
    # A sequence may fill a context that the user set. Without one, only the response and some prompt are known.
    longest = asked if asked is not None else response + 1
    budget = config.train.packing_budget
    if budget < longest:
        yield Problem(
            "train.max_tokens_per_microbatch",
            f"{budget} does not hold the longest sequence of "
            + (
                f"{longest} tokens (model.context_length)"
                if asked is not None
                else f"{response} response tokens and a prompt"
            )
            + f"; use at least {longest}",
        )
    pool = config.engine.max_total_tokens
    if pool is not None and pool < longest:
        yield Problem(
            "engine.max_total_tokens", f"{pool} KV slots do not hold one sequence of {longest} tokens; use more"
        )


def _data_problems(config: Config) -> Iterator[Problem]:
    sources: list[tuple[str, DataConfig]] = [("data", config.data)]
    if config.eval.data is not None:
        sources.append(("eval.data", config.eval.data))
    for key, data in sources:
        given = {"system_prompt": data.system_prompt is not None, "chat_template_args": bool(data.chat_template_args)}
        for name, is_given in given.items():
            if is_given and data.chat_template is False:
                yield Problem(
                    f"{key}.{name}",
                    f"has no effect without a chat template; take it out, or set {key}.chat_template to auto or true",
                )


def _parallel_problems(config: Config, facts: ModelFacts | None) -> Iterator[Problem]:
    if facts is None or facts.attention_heads is None or facts.key_value_heads is None:
        return
    heads, kv_heads = facts.attention_heads, facts.key_value_heads
    size = config.train.tensor_parallel
    if heads % size or kv_heads % size:
        yield Problem(
            "train.tensor_parallel",
            f"{size} does not divide the model's {heads} attention heads and {kv_heads} key-value heads",
        )
    size = config.engine.tensor_parallel
    # SGLang repeats key-value heads where there are fewer than ranks.
    if heads % size or (kv_heads % size and size % kv_heads):
        yield Problem(
            "engine.tensor_parallel",
            f"{size} does not fit the model's {heads} attention heads and {kv_heads} key-value heads",
        )


def _debug_problems(config: Config) -> Iterator[Problem]:
    debug = config.debug
    if debug.train_only and debug.rollout_only:
        yield Problem("debug.train_only", "and debug.rollout_only leave nothing to do; set one of them")
    if debug.train_only and debug.load_rollouts is None:
        yield Problem(
            "debug.load_rollouts", "is not set; debug.train_only needs a directory that debug.save_rollouts wrote"
        )
    if debug.load_rollouts is not None and not debug.train_only:
        yield Problem("debug.load_rollouts", "is read by debug.train_only alone; set that too, or take this out")
    if debug.rollout_only and isinstance(config.checkpoint.resume, Path):
        yield Problem(
            "checkpoint.resume",
            f"{config.checkpoint.resume} is for a trainer, and debug.rollout_only has none: engines serve the model as "
            f"it is on disk; set model.path = {config.checkpoint.resume / 'model'}",
        )
    saved = debug.load_rollouts
    replays_itself = saved is not None and saved.resolve().is_relative_to(config.run.dir.resolve())
    if config.run.if_exists == "resume" and (debug.rollout_only or (debug.train_only and replays_itself)):
        yield Problem(
            "run.if_exists",
            f"resume lets half a job go on with {config.run.dir}: its steps, groups and checkpoints would pass for "
            "those of the run; choose another run.dir",
        )


def _host_problems(config: Config, machine: Machine) -> Iterator[Problem]:
    if not is_loopback(config.run.host):
        yield Problem(
            "run.host",
            f"{config.run.host} is no IPv4 loopback address; the servers of a job take commands from whoever reaches "
            "them, so they stay on 127.0.0.1",
        )
    if config.run.stop_grace_s >= _AGENT_GRACE_S:
        yield Problem(
            "run.stop_grace_s",
            f"{config.run.stop_grace_s:g} s is too long: torchrun kills its ranks {_AGENT_GRACE_S:g} s after the "
            "signal; use less",
        )
    concurrency = concurrency_of(config, planned_engines(config), machine.open_files)
    needed = files_for(concurrency)
    if machine.open_files is not None and machine.open_files < needed and not config.debug.train_only:
        most = most_requests(machine.open_files)
        yield Problem(
            "rollout.concurrency",
            f"{concurrency} requests in flight need {needed} open files in the router, and this machine allows a "
            f"process {machine.open_files}: raise the hard limit (ulimit -Hn, LimitNOFILE=), or use at most {most}",
        )
    if config.engine.cpus is not None:
        absent = sorted(set(config.engine.cpus) - set(machine.cpus))
        if absent or not config.engine.cpus:
            yield Problem(
                "engine.cpus",
                f"{list(config.engine.cpus)} cannot be bound to; this job may run on cores "
                f"{', '.join(map(str, machine.cpus))}",
            )
