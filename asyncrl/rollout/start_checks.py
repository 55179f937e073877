"""What `RolloutExecutor` and its data would refuse at their start, found without data, engines or processes."""

from __future__ import annotations

from asyncrl.config import Config
from asyncrl.config.checks.named_code import TASKS, is_generated
from asyncrl.data.dotted_path import resolve_dotted_path
from asyncrl.data.tokenizer import PolicyTokenizer
from asyncrl.errors import DataError
from asyncrl.rollout.evaluation_process import find_function
from asyncrl.rollout.rewards.registry import resolve_reward
from asyncrl.rollout.sampling import eval_sampling, longest_prompt, training_sampling
from asyncrl.rollout.scheduling.filters import Filters


def check_rollouts(config: Config) -> None:
    """Imports the code that the configuration names, and holds sampling against the tokenizer of the model.

    A model that is not there yet is left to the start. Raises RewardError, ConfigError, DataError, ModelError.
    """
    reward = config.reward
    resolve_reward(reward.function, reward.args, reward.scope)
    Filters(config.rollout.filters)
    if config.eval.function is not None:
        find_function(config.eval)
    sources = [("data", config.data)] + ([("eval.data", config.eval.data)] if config.eval.data is not None else [])
    for key, data in sources:
        if is_generated(data.source) and not data.source.startswith(TASKS):
            resolve_dotted_path(data.source, setting=f"{key}.source", error=DataError)
    if not (config.model.path / "config.json").exists():
        return
    tokenizer = PolicyTokenizer.load(config.model.path)
    training = training_sampling(config, tokenizer)
    samplings = {"data": training, "eval.data": eval_sampling(config, training)}
    for key, data in sources:
        tokenizer.uses_chat_template(data.chat_template)
        longest_prompt(config, tokenizer, samplings[key])
