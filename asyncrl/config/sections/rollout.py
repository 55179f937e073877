"""How samples are drawn and scored."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from asyncrl.config.sections.base import Section


class RolloutConfig(Section):
    """Sampling of one batch."""

    prompts_per_step: int = Field(default=8, ge=1)
    """Prompt groups in one training batch."""

    samples_per_prompt: int = Field(default=8, ge=1)
    """Samples of one prompt group (the G of GRPO)."""

    max_new_tokens: int = Field(default=64, ge=1)
    """Longest response in tokens."""

    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; the trainer computes its log-probs at the same temperature. 0 is refused for training."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Must be 1 for training: the engine does not renormalise its log-probs for top-p."""

    top_k: int = -1
    """Must be -1 (off) for training: the engine does not renormalise its log-probs for top-k."""

    stop: tuple[str, ...] = ()
    """Strings that end a response besides the model's own end tokens. One that is one token of the tokenizer ends it as
    that token, and is left out of the text; one of several tokens (`</answer>`) stays in the text, and the response
    ends with the token that completes it."""

    ignore_eos: bool = False
    """Always sample max_new_tokens tokens. (The engine then ignores all stop tokens too.)"""

    concurrency: int | None = Field(default=None, ge=1)
    """Requests in flight at once, each of which takes two open files of the router. none: for each engine that serves,
    external ones too, engine.max_running_requests, or 256 where that is none; at most what open files allow."""

    adaptive_concurrency: bool = False
    """Keep fewer than that in flight while engines queue requests or run out of KV memory: fewer when an engine is
    found overloaded, fewer again once that has had its effect, slowly more afterwards. Works with external engines
    too."""

    request_timeout_s: float = Field(default=600.0, gt=0)
    """Longest wait for one response. Time does not count while engines are paused, for an update of the weights or
    because the trainer has the GPUs that they share."""

    request_retries: int = Field(default=4, ge=0)
    """Attempts after the first for a request whose connection broke, or that got a 5xx or no answer in time. A request
    that is refused for now (429, 503) waits instead, request_timeout_s in all. A wrong request (4xx) fails at once."""

    max_staleness: int | None = Field(default=None, ge=0)
    """Most optimizer steps between the weights that made a token and the weights that it trains: a hard bound, from
    which follows how far train_async.py generates ahead. none: the least that works, train.minibatches *
    train.batch_epochs * train.update_weights_interval - 1, which is 0 (synchronous) where all three are 1."""

    straggler: Literal["wait", "reissue"] = "wait"
    """What happens to an unfinished prompt group that would be too old after this step. wait: the trainer waits for it.
    reissue: its samples are dropped and its prompt is issued again (favours short responses)."""

    filters: tuple[str, ...] = ()
    """Take finished groups out of training; other groups take their place. zero_variance: if all rewards are equal. Or
    `package.module:function`, called with the SampleGroup, which returns None or the reason to take it out."""

    oversample: int = Field(default=0, ge=0)
    """Groups generated beyond the size of a batch, so that filters and slow responses do not hold it up. A group for
    which no batch has room before it is too old is dropped (favours short responses)."""


RewardScope = Literal["sample", "group"]


class RewardConfig(Section):
    """How a sample is scored."""

    function: str = "exact_match"
    """Name in the registry (exact_match, math_verify, reasoning_gym, length) or a dotted path
    `package.module:function`; sync or async, called with (sample, prompt), returning a number, or a dict: its `score`
    is the reward and its other numbers are logged as rollout/reward/<name>_mean; without `score` their sum is the
    reward."""

    scope: RewardScope = "sample"
    """What one call scores. sample: one sample, as soon as it is generated; group: a `package.module:function` is
    called with (samples, prompt) once all samples of the prompt are there, and returns a float for each sample, or
    None to abstain. Samples that could not be generated are left out."""

    args: dict[str, str | float | int | bool] = Field(default_factory=dict)
    """Keyword arguments bound to the function; of a built-in one they are checked with the configuration."""

    timeout_s: float = Field(default=30.0, gt=0)
    """A call that takes longer is ended, and its sample, or all samples of its group, are counted as failed."""

    workers: int = Field(default=1, ge=0)
    """Processes that run sync functions so that a slow or hanging one never stalls the event loop; 0 runs them in the
    driver."""

    max_failure_fraction: float = Field(default=0.5, ge=0, le=1)
    """A reward that fails on more than this fraction of the first batch stops the run. Below it, and later, a sample
    whose reward fails is left out of its group, and counted in each step's line."""
