"""The whole configuration of a job."""

from __future__ import annotations

from pydantic import Field

from asyncrl.config.base import Section
from asyncrl.config.checkpoint import CheckpointConfig
from asyncrl.config.data import DataConfig
from asyncrl.config.debug import DebugConfig
from asyncrl.config.inference import EngineConfig, HealthConfig, RouterConfig, ServedModelConfig, WeightsConfig
from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import RewardConfig, RolloutConfig
from asyncrl.config.run import EvalConfig, RunConfig
from asyncrl.config.training import TrainConfig, WarmupConfig


class Config(Section):
    """Everything that a job needs to know before it starts."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    warmup: WarmupConfig = Field(default_factory=WarmupConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    health: HealthConfig = Field(default_factory=HealthConfig)
    router: RouterConfig = Field(default_factory=RouterConfig)
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    debug: DebugConfig = Field(default_factory=DebugConfig)
    models: dict[str, ServedModelConfig] = Field(default_factory=dict)
    """Models that are served beside the trained one and never change, each in a section [models.NAME]."""
