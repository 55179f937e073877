"""From the configuration and the tokenizer to the sampling parameters of a request. Pure."""

from __future__ import annotations

from asyncrl.config import Config
from asyncrl.data.tokenizer import PolicyTokenizer
from asyncrl.errors import ConfigError, counted
from asyncrl.rollout.requests.wire import SamplingParams

_ENGINE_RESERVE = 7  # SGLang takes prompts of at most context - 7 tokens, however short the response


def training_sampling(config: Config, tokenizer: PolicyTokenizer) -> SamplingParams:
    """Sampling of training rollouts; ConfigError for settings that cannot work together."""
    rollout = config.rollout
    if rollout.ignore_eos and rollout.stop:
        raise ConfigError(
            "rollout.ignore_eos makes the engine ignore all stop tokens, so rollout.stop would have no effect; "
            "unset one of them"
        )
    single = {string: tokenizer.token_of(string) for string in rollout.stop}
    stops = {*tokenizer.stop_token_ids, *(token for token in single.values() if token is not None)}
    return SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop_token_ids=tuple(sorted(stops)),
        ignore_eos=rollout.ignore_eos,
        stop=tuple(string for string, token in single.items() if token is None),
    )


def eval_sampling(config: Config, training: SamplingParams) -> SamplingParams:
    """Sampling of evaluation: the same end tokens, its own temperature and length, no nucleus."""
    return SamplingParams(
        max_new_tokens=config.eval.max_new_tokens or training.max_new_tokens,
        temperature=config.eval.temperature,
        stop_token_ids=training.stop_token_ids,
        ignore_eos=training.ignore_eos,
        stop=training.stop,
    )


def context_limit(config: Config, tokenizer: PolicyTokenizer) -> int:
    """Longest prompt + response in tokens: the least of what model, configuration and KV pool allow."""
    return min(
        config.model.context_length or tokenizer.context_length,
        config.engine.max_total_tokens or tokenizer.context_length,
    )


def longest_prompt(config: Config, tokenizer: PolicyTokenizer, sampling: SamplingParams) -> int:
    """Tokens that a prompt may have; ConfigError when there is room for none."""
    limit = context_limit(config, tokenizer)
    longest = limit - max(sampling.max_new_tokens, _ENGINE_RESERVE)
    if longest < 1:
        raise ConfigError(
            f"responses of {counted(sampling.max_new_tokens, 'token')} leave no room for a prompt in a context of "
            f"{limit}; lower rollout.max_new_tokens (or eval.max_new_tokens)"
        )
    return longest
