"""Combinations that cannot work are refused together, with the arithmetic and the fix."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest

from asyncrl.config.checks.named_code import BUILTIN_FILTERS, BUILTIN_REWARDS, reasoning_gym_tasks
from asyncrl.config.machine import Machine
from asyncrl.rollout.rewards import builtin
from asyncrl.rollout.scheduling import filters

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.parametrize(
    ("argv", "key", "text"),
    [
        (["--rollout.temperature", "0"], "rollout.temperature", "log-probs at temperature 0 are undefined"),
        (["--rollout.top-p", "0.9"], "rollout.top_p", "not renormalised for top-p"),
        (["--rollout.top-k", "20"], "rollout.top_k", "not renormalised for top-k"),
        (["--rollout.samples-per-prompt", "1"], "rollout.samples_per_prompt", "every advantage would be 0"),
        (["--rollout.stop", ""], "rollout.stop", "end every response at once"),
        (["--rollout.ignore-eos", "--rollout.stop", "x"], "rollout.ignore_eos", "ignores stop strings too"),
        (["--train.minibatches", "3"], "rollout.prompts_per_step", "8 prompts cannot be split evenly among 3"),
        (["--train.minibatches", "16"], "rollout.prompts_per_step", "use 16"),
        (
            ["--train.minibatches", "2", "--train.update-weights-interval", "3", "--rollout.max-staleness", "4"],
            "rollout.max_staleness",
            "2 * 3 - 1 = 5 steps ahead of the newest weights to sample from; use at least 5",
        ),
        (
            ["--train.minibatches", "2", "--train.batch-epochs", "3", "--rollout.max-staleness", "4"],
            "rollout.max_staleness",
            "2 * 3 = 6 optimizer steps for each batch (train.minibatches * train.batch_epochs)",
        ),
        (
            ["--train.minibatches", "2", "--train.batch-epochs", "3", "--rollout.max-staleness", "4"],
            "rollout.max_staleness",
            "6 * 1 - 1 = 5 steps ahead of the newest weights to sample from; use at least 5",
        ),
        (["--train.batch-epochs", "0"], "train.batch_epochs", "'0' is not allowed; expected whole number, at least 1"),
        (
            ["--train.update-weights-interval", "2", "--eval.data.source", "train.jsonl", "--eval.every", "3"],
            "eval.every",
            "3 is no multiple of 2 (train.update_weights_interval)",
        ),
        (
            ["--eval.function", "asyncrl.demo.task:heldout_prompts", "--eval.data.source", "train.jsonl"],
            "eval.function",
            "evaluates in the place of eval.data; take one of the two out",
        ),
        (["--eval.function", "no_such:evaluate"], "eval.function", "there is no module 'no_such'"),
        (
            ["--eval.function", "asyncrl.demo.task:heldout_prompts", "--weights.keep-published", "never"],
            "weights.keep_published",
            "they read the copy; use auto or always",
        ),
        (["--eval.function-args.k", "4"], "eval.function_args", "set eval.function"),
        (
            ["--weights.on-update", "in_place", "--engine.server-args.speculative-algorithm", "NGRAM"],
            "weights.on_update",
            "it makes an unknown number of tokens",
        ),
        (["--rollout.filters", "zero_varianc"], "rollout.filters", "did you mean zero_variance?"),
        (["--rollout.filters", "zzz"], "rollout.filters", "known are zero_variance, and any package.module:function"),
        (["--rollout.filters", "nowhere:judge"], "rollout.filters", "there is no module 'nowhere'"),
        (["--train.num-steps", "none", "--train.lr-decay", "cosine"], "train.lr_decay", "the length of the run"),
        (["--train.num-steps", "none", "--data.size", "3"], "data.size", "3 prompts cannot fill one batch of 8"),
        (["--rollout.temperature", "1e-9"], "rollout.temperature", "taken for 0 (greedy) by the engine"),
        (["--train.lr", "1e39"], "train.lr", "1e+39 is inf in float32"),
        (["--train.adam-eps", "1e-60"], "train.adam_eps", "1e-60 is 0 in float32"),
        (["--train.adam-beta2", "0.9999999999"], "train.adam_beta2", "is 1 in float32"),
        (["--model.context-length", "1024"], "model.context_length", "over the model's own limit of 512"),
        (["--rollout.max-new-tokens", "512"], "rollout.max_new_tokens", "no room for a prompt in a context of 512"),
        (["--model.context-length", "64"], "rollout.max_new_tokens", "in a context of 64 tokens"),
        (["--eval.max-new-tokens", "600"], "eval.max_new_tokens", "no room for a prompt"),
        (["--train.max-tokens-per-microbatch", "64"], "train.max_tokens_per_microbatch", "use at least 65"),
        (
            ["--train.max-tokens-per-microbatch", "200", "--model.context-length", "300"],
            "train.max_tokens_per_microbatch",
            "300 tokens (model.context_length)",
        ),
        (["--engine.max-total-tokens", "10"], "engine.max_total_tokens", "do not hold one sequence of 65"),
        (["--data.size", "0"], "data.size", "'0' is not allowed; expected whole number, at least 1"),
        (["--data.system-prompt", "hi", "--data.chat-template", "false"], "data.system_prompt", "no effect"),
        (
            ["--data.chat-template-args.enable-thinking", "false", "--data.chat-template", "false"],
            "data.chat_template_args",
            "no effect",
        ),
        (["--engine.tensor-parallel", "3"], "engine.tensor_parallel", "4 attention heads and 2 key-value heads"),
        (["--run.host", "0.0.0.0"], "run.host", "no IPv4 loopback address"),
        (["--run.host", "example.org"], "run.host", "no IPv4 loopback address"),
        (["--run.stop-grace-s", "30"], "run.stop_grace_s", "torchrun kills its ranks 30 s after"),
        (["--engine.cpus", "0,99"], "engine.cpus", "may run on cores 0"),
        (["--engine.cpus", "[]"], "engine.cpus", "may run on cores 0"),
        (["--eval.data.size", "0"], "eval.data.size", "'0' is not allowed"),
        (["--eval.data.size", "5"], "eval.data.source", "is not set"),
        (["--data.source", ""], "data.source", "is not set"),
        (["--data.source", "gone.jsonl"], "data.source", "gone.jsonl does not exist (looked in "),
        (["--warmup.steps", "3"], "warmup.source", "is not set"),
        (["--model.path", "gone"], "model.path", "nothing is downloaded"),
        (["--model.path", "train.jsonl"], "model.path", "is a file"),
        (["--model.path", "."], "model.path", "holds no config.json"),
        (["--run.dir", ".", "--run.if-exists", "overwrite"], "run.if_exists", "would erase"),
        (["--debug.train-only", "--debug.rollout-only"], "debug.train_only", "leave nothing to do"),
        (["--debug.train-only"], "debug.load_rollouts", "needs a directory that debug.save_rollouts wrote"),
        (["--debug.train-only", "--debug.load-rollouts", "gone"], "debug.load_rollouts", "gone is no directory"),
        (["--debug.load-rollouts", "."], "debug.load_rollouts", "is read by debug.train_only alone"),
        (
            ["--debug.rollout-only", "--checkpoint.resume", "runs/x/checkpoints/step-000004"],
            "checkpoint.resume",
            "set model.path = runs/x/checkpoints/step-000004/model",
        ),
        (["--checkpoint.resume", "gone"], "checkpoint.resume", "gone does not exist (looked in "),
        (["--checkpoint.resume", "."], "checkpoint.resume", "is no checkpoint (it holds no manifest.json)"),
        (["--debug.rollout-only", "--run.if-exists", "resume"], "run.if_exists", "half a job go on with"),
        (
            ["--debug.train-only", "--debug.load-rollouts", ".", "--run.dir", ".", "--run.if-exists", "resume"],
            "run.if_exists",
            "half a job go on with",
        ),
        (["--model.builder", "json"], "model.builder", "'json' is not of the form package.module:function"),
        (["--model.builder", "nowhere:build"], "model.builder", "there is no module 'nowhere' (looked in "),
        (["--data.source", "nowhere:prompts"], "data.source", "there is no module 'nowhere'"),
        (["--data.source", "reasoning_gym:"], "data.source", "write reasoning_gym:TASK"),
        (["--data.source", "reasoning_gym:chain_sums"], "data.source", "did you mean chain_sum?"),
        (["--train.algorithm", "ppo"], "train.algorithm", "there is no algorithm 'ppo'"),
        (["--train.algorithm", "grop"], "train.algorithm", "did you mean grpo?"),
        (["--train.algorithm", "nowhere:Mine"], "train.algorithm", "there is no module 'nowhere'"),
        (
            ["--train.algorithm-args.gamma", "1"],
            "train.algorithm_args",
            "for an algorithm of your own; the settings of grpo are those of [algorithm]",
        ),
        (
            ["--algorithm.ratio-max", "3"],
            "algorithm.ratio_max",
            "grpo has no such setting; it has a",
        ),
        (
            ["--train.algorithm", "sft", "--algorithm.clip-low", "0.1"],
            "algorithm.clip_low",
            "sft has no such setting; it h",
        ),
        (
            ["--train.algorithm", "distill", "--algorithm.teacher-weight", "0"],
            "algorithm.teacher_weight",
            "0 leaves distill nothing to learn from",
        ),
        (
            ["--algorithm.correction", "mask", "--algorithm.correction-lower", "3"],
            "algorithm.correction_lower",
            "3 is over algorithm.correction_upper = 2",
        ),
        (
            ["--algorithm.correction", "mask", "--algorithm.old-logprobs", "engine"],
            "algorithm.old_logprobs",
            "a correction compares with the trainer's log-probs",
        ),
        (["--train.algorithm", "distill"], "algorithm.teacher", "is not set; give the directory of the model to learn"),
        (["--algorithm.reference", "nowhere"], "algorithm.reference", "nowhere is no Hugging Face model directory"),
        (["--algorithm.dual-clip", "0.5"], "algorithm.dual_clip", "expected number, over 1, or none"),
        (
            ["--track.to", "wandp"],
            "track.to",
            "wandp is none of tensorboard, wandb, trackio, nor of the form package.m",
        ),
        (["--track.to", "nowhere:Sink"], "track.to", "there is no module 'nowhere'"),
        (["--track.to", "wandb", "wandb"], "track.to", "names a tracker twice"),
        (["--track.args", "{wandb = {mode = 'offline'}}"], "track.args", "wandb is not in track.to (which is empty)"),
        (
            ["--track.to", "wandb", "--track.args", "{wandb = {api_key = 'x'}}"],
            "track.args",
            "wandb.api_key is a secret, which no file of a run holds; set it in the environment",
        ),
        (["--reward.function", "exact_mach"], "reward.function", "no reward 'exact_mach'; did you mean exact_match?"),
        (["--reward.function", "zzz"], "reward.function", "known are exact_match, length, math_verify"),
        (["--reward.function", "json.loads"], "reward.function", "did you mean json:loads?"),
        (["--reward.function", "json:"], "reward.function", "not of the form package.module:function"),
        (["--reward.function", "nowhere:score"], "reward.function", "there is no module 'nowhere'"),
        (["--reward.function", "length"], "reward.args", "length needs target; set --reward.args.target VALUE"),
        (
            ["--reward.function", "length", "--reward.args.target", "0"],
            "reward.args.target",
            "0 is not allowed; length expects a number over 0",
        ),
        (["--reward.args.strp", "false"], "reward.args.strp", "takes strip, ignore_case; did you mean strip?"),
        (["--reward.args.strip", "no"], "reward.args.strip", "'no' is not allowed; exact_match expects true or false"),
        (["--reward.scope", "group"], "reward.scope", "exact_match scores one sample at a time"),
        (
            ["--reward.function", "reasoning_gym", "--reward.args.task", "chain"],
            "reward.args.task",
            "reasoning_gym has no task 'chain'",
        ),
    ],
)
def test_an_impossible_setting_is_refused(refused, argv, key, text):
    assert text in refused(*argv)[key]


@pytest.mark.parametrize(
    "argv",
    [
        ["--train.algorithm", "sft", "--rollout.samples-per-prompt", "1"],
        ["--train.num-steps", "0", "--data.source", ""],
        ["--warmup.steps", "0", "--warmup.source", "gone.jsonl"],
        ["--train.minibatches", "4"],
        ["--train.batch-epochs", "3"],
        ["--train.minibatches", "2", "--train.batch-epochs", "3", "--rollout.max-staleness", "5"],
        ["--model.path", "gone", "--model.builder", "json.tool:main"],
        ["--data.source", "reasoning_gym:chain_sum"],
        ["--data.source", "json:loads"],
        ["--reward.function", "my_rewards:score", "--reward.args.anything", "1"],
        ["--reward.function", "my_rewards:score", "--reward.scope", "group"],
        ["--reward.function", "length", "--reward.args.target", "8"],
        ["--rollout.max-new-tokens", "511"],
        ["--eval.temperature", "0"],
        ["--run.host", "localhost"],
        ["--run.host", "127.0.0.2"],
        ["--engine.tensor-parallel", "4"],
        ["--run.if-exists", "overwrite"],
    ],
)
def test_an_unusual_setting_that_works_is_not_refused(load, argv):
    Path("my_rewards.py").write_text("from anywhere import *")
    load(*argv)


@pytest.mark.parametrize("key", ["algorithm.reference", "algorithm.teacher", "models.judge.path"])
def test_a_model_beside_the_trained_one_is_not_in_the_run_that_is_overwritten(refused, key):
    export = Path("old/export")
    export.mkdir(parents=True)
    overwriting = ("--run.dir", "old", "--run.if-exists", "overwrite", f"--{key}", str(export))
    assert f"which holds {key} ({export})" in refused(*overwriting)["run.if_exists"]


def test_a_checkpoint_to_begin_from_is_not_in_the_run_that_is_overwritten(refused):
    checkpoint = Path("old/checkpoints/step-000004")
    checkpoint.mkdir(parents=True)
    overwriting = ("--run.dir", "old", "--run.if-exists", "overwrite", "--checkpoint.resume", str(checkpoint))
    assert f"which holds checkpoint.resume ({checkpoint})" in refused(*overwriting)["run.if_exists"]


def test_a_system_prompt_needs_a_tokenizer_with_a_chat_template(load, refused):
    prompt = ("--data.system-prompt", "Be brief.")
    load(*prompt)  # the model's directory does not say
    Path("model/tokenizer_config.json").write_text("{}")
    assert "no chat template; take it out" in refused(*prompt)["data.system_prompt"]
    arguments = ["--data.chat-template-args.enable-thinking", "false"]
    assert "no chat template; take them out" in refused(*arguments)["data.chat_template_args"]
    assert "no chat template" in refused("--data.chat-template", "true")["data.chat_template"]
    Path("model/chat_template.jinja").write_text("{{ messages }}")
    load(*prompt)
    Path("model/chat_template.jinja").unlink()
    Path("model/tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    load(*prompt)


def test_the_table_of_builtin_rewards_is_that_of_their_functions():
    assert tuple(filters.BUILTIN) == BUILTIN_FILTERS
    functions = {name: function for name, function in vars(builtin).items() if name in BUILTIN_REWARDS}
    assert functions.keys() == BUILTIN_REWARDS.keys()
    for name, function in functions.items():
        parameters = list(inspect.signature(function).parameters.values())[2:]
        assert [parameter.name for parameter in parameters] == list(BUILTIN_REWARDS[name].args)
        needed = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
        assert needed == ([BUILTIN_REWARDS[name].needs] if BUILTIN_REWARDS[name].needs else [])


def test_the_list_of_tasks_is_that_of_reasoning_gym():
    import reasoning_gym  # noqa: F401 - fills the registry
    from reasoning_gym.factory import DATASETS

    assert reasoning_gym_tasks() == set(DATASETS)


@pytest.mark.parametrize(
    ("ranks", "tensor_parallel", "prompts", "works"),
    [(2, 1, 8, True), (2, 1, 7, False), (3, 1, 8, False), (4, 2, 6, True), (4, 2, 5, False), (2, 2, 5, True)],
)
def test_a_batch_must_divide_among_the_copies_of_the_model(load, refused, ranks, tensor_parallel, prompts, works):
    machine = Machine(world_size=ranks, local_world_size=ranks)
    argv = ["--rollout.prompts-per-step", str(prompts), "--train.tensor-parallel", str(tensor_parallel)]
    if works:
        load(*argv, machine=machine)
    else:
        found = refused(*argv, machine=machine)
        assert list(found) == ["rollout.prompts_per_step"]
        assert f"{ranks // tensor_parallel} data-parallel copies" in found["rollout.prompts_per_step"]


def test_a_model_whose_config_cannot_be_read_leaves_the_context_unchecked(load):
    Path("model/config.json").write_text("{broken")
    load("--rollout.max-new-tokens", "5000")
    Path("model/config.json").write_text(json.dumps({"max_position_embeddings": "many"}))
    load("--rollout.max-new-tokens", "5000")


def test_heads_must_divide_among_trainer_ranks(refused):
    machine = Machine(world_size=4, local_world_size=4)
    found = refused("--train.tensor-parallel", "4", machine=machine)
    assert "4 does not divide the model's 4 attention heads and 2 key-value heads" in found["train.tensor_parallel"]


def test_problems_of_layout_and_arithmetic_are_listed_together(refused):
    found = refused("--engine.gpus", "0", "--rollout.temperature", "0", "--engine.server-args.nope", "1")
    assert {"engine.gpus", "rollout.temperature", "engine.server_args.nope"} <= set(found)


def test_the_readme_explains_every_argument_of_a_builtin_reward():
    rows = dict(re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", README.read_text(), re.MULTILINE))
    for name, reward in BUILTIN_REWARDS.items():
        assert all(re.search(rf"`{argument}\b", rows[name]) for argument in reward.args), name
