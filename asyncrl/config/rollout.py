"""How samples are drawn and scored."""

from __future__ import annotations

from pydantic import Field

from asyncrl.config.base import Section


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
    """Strings that end a response besides the model's own end tokens; each must be one token."""

    ignore_eos: bool = False
    """Sample to max_new_tokens whatever comes (the engine then ignores all stop tokens too)."""

    concurrency: int = Field(default=256, ge=1)
    """Requests in flight at once."""

    request_timeout_s: float = Field(default=600.0, gt=0)
    """Longest wait for one response; the pause of a weight update counts too."""

    request_retries: int = Field(default=4, ge=0)
    """Attempts after the first for a request whose connection broke or that got a 5xx."""


class RewardConfig(Section):
    """How a sample is scored."""

    function: str = "exact_match"
    """Name in the registry (exact_match, math_verify, reasoning_gym, length) or a dotted path
    `package.module:function`; sync or async, called with (sample, prompt), returning a float."""

    args: dict[str, str | float | int | bool] = Field(default_factory=dict)
    """Keyword arguments bound to the function; of a built-in one they are checked with the configuration."""

    timeout_s: float = Field(default=30.0, gt=0)
    """A call that takes longer is ended and counted as failed."""

    workers: int = Field(default=1, ge=0)
    """Processes that run sync functions so that a slow or hanging one never stalls the event loop; 0 runs them in the
    driver."""

    max_failure_fraction: float = Field(default=0.5, ge=0, le=1)
    """Failing on more than this fraction of the first batch stops the run. Later, and below it, a sample whose reward
    fails is left out of its group, and counted in each step's line."""
