"""Values that no run can use, refused by key however the config was made: by a file, a command line or in Python."""

import re
from collections.abc import Mapping

from turnwise.choices import SandboxLevel, TrackerName
from turnwise.config import Config
from turnwise.errors import ConfigError, unknown
from turnwise.knobs import problems

DEFAULT, COMMAND_LINE = "default", "command line"
SMALLEST_TEMPERATURE = 1e-3
"""Below it logits divided by the temperature leave the range of float32; 0 is greedy."""


def check_config(config: Config, origins: Mapping[str, str] | None = None) -> None:
    """Refuse a config with a value that cannot be used, however it was made; `origins` say where values are from."""
    if not isinstance(config, Config):
        raise ConfigError(f"expected a Config, as turnwise.configure gives it, not {type(config).__name__}")
    for key, problem in problems(config):
        origin = (origins or {}).get(key, DEFAULT)
        raise ConfigError(f"{'' if origin in (DEFAULT, COMMAND_LINE) else f'{origin}: '}{key} {problem}")
    if 0 < config.sampling.temperature < SMALLEST_TEMPERATURE:
        raise ConfigError(
            f"sampling.temperature must be 0 (greedy) or at least {SMALLEST_TEMPERATURE}, "
            f"not {config.sampling.temperature}"
        )
    if "" in config.sampling.stop:
        raise ConfigError("sampling.stop: an empty text would end every turn at once")
    for name, options in config.scoring.options.items():
        if not isinstance(options, dict):
            raise ConfigError(f"scoring.options.{name} must be options by name, such as {{wrong: 0}}, not {options!r}")
    if config.sandbox.min_level is SandboxLevel.auto:
        raise ConfigError("sandbox.min_level is a level (L0, L2, L3 or L4); auto is for sandbox.level")
    most, zone = config.rollout.max_tokens, config.algorithm.overlong_tokens
    if most is not None and zone > most:
        raise ConfigError(f"algorithm.overlong_tokens must be at most rollout.max_tokens={most}, not {zone}")
    trackers = config.tracking.to
    for name in trackers:
        if name not in [choice.value for choice in TrackerName]:
            raise ConfigError(f"tracking.to: {unknown('tracker', name, [choice.value for choice in TrackerName])}")
        if trackers.count(name) > 1:
            raise ConfigError(f"tracking.to names {name!r} more than once")
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", config.learner.device):
        raise ConfigError(f"learner.device must be auto, cpu or cuda, not {config.learner.device!r}")
