"""The whole configuration of a job."""

from __future__ import annotations

from pydantic import Field

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.base import Section
from asyncrl.config.sections.checkpoint import CheckpointConfig
from asyncrl.config.sections.data import DataConfig
from asyncrl.config.sections.debug import DebugConfig
from asyncrl.config.sections.inference import EngineConfig, HealthConfig, RouterConfig, ServedModelConfig, WeightsConfig
from asyncrl.config.sections.model import ModelConfig
from asyncrl.config.sections.rollout import RewardConfig, RolloutConfig
from asyncrl.config.sections.run import EvalConfig, RunConfig
from asyncrl.config.sections.shown import SamplesConfig, TrackConfig
from asyncrl.config.sections.training import TrainConfig, WarmupConfig


class Config(Section):
    """All settings of a job."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    warmup: WarmupConfig = Field(default_factory=WarmupConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    health: HealthConfig = Field(default_factory=HealthConfig)
    router: RouterConfig = Field(default_factory=RouterConfig)
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    samples: SamplesConfig = Field(default_factory=SamplesConfig)
    track: TrackConfig = Field(default_factory=TrackConfig)
    debug: DebugConfig = Field(default_factory=DebugConfig)
    models: dict[str, ServedModelConfig] = Field(default_factory=dict)
    """Models that are served beside the trained one and never change, each in a section [models.NAME]."""
