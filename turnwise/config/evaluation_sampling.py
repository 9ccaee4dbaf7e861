"""How evaluations draw their turns: as `sampling` says, but for what `eval.sampling` sets."""

import dataclasses

from turnwise.config import Config, SamplingConfig


def evaluation_sampling(config: Config) -> SamplingConfig:
    """The sampling of evaluations; a checked config has no unknown names."""
    return dataclasses.replace(config.sampling, **config.eval.sampling)


def as_evaluated(config: Config) -> Config:
    """The config of a run whose episodes are all drawn as evaluations are."""
    own = dataclasses.replace(config.eval, sampling={})
    return dataclasses.replace(config, sampling=evaluation_sampling(config), eval=own)


def longest_turn(config: Config) -> int:
    """Most tokens of a turn, in training or in an evaluation."""
    return max(config.sampling.max_tokens, evaluation_sampling(config).max_tokens)
