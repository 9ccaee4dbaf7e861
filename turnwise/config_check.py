"""Values that no run can use, refused by key however the config was made: by a file, a command line or in Python."""

import dataclasses
import re
from collections.abc import Mapping

from turnwise.addresses import texts_with_userinfo
from turnwise.choices import SandboxLevel, TrackerName
from turnwise.config import Config
from turnwise.errors import ConfigError, unknown
from turnwise.knobs import problems

DEFAULT, COMMAND_LINE = "default", "command line"
KEY_OF = {
    "engine.base_url": "set OPENAI_API_KEY",
    "engine.servers": "set TURNWISE_ENGINE_KEY",
    "sandbox.": "set TURNWISE_SANDBOX_TOKEN",
    "scoring.url": "set TURNWISE_REWARD_TOKEN",
    "scoring.options.swe_tests": "set TURNWISE_SANDBOX_TOKEN",
    "scoring.options.code_tests": "set TURNWISE_SANDBOX_TOKEN",
    "scoring.options": "name the variable that holds its key in api_key_env",
    "rollout.interaction_kwargs": "name the variable that holds its key in api_key_env",
    "rollout.agent_options": "set TURNWISE_ENV_TOKEN, or name another variable in token_env",
    "data.": "set HF_TOKEN",
    "model.": "set HF_TOKEN",
    "": "keep it in a variable of the environment",
}
"""Where the key of an address belongs, by the start of the address's own key."""
SMALLEST_TEMPERATURE = 1e-3
"""Below it logits divided by the temperature leave the range of float32; 0 is greedy."""


def check_config(config: Config, origins: Mapping[str, str] | None = None) -> None:
    """Refuse a config with a value that cannot be used, however it was made; `origins` say where values are from."""
    if not isinstance(config, Config):
        raise ConfigError(f"expected a Config, as turnwise.configure gives it, not {type(config).__name__}")
    for key, problem in problems(config):
        origin = (origins or {}).get(key, DEFAULT)
        raise ConfigError(f"{'' if origin in (DEFAULT, COMMAND_LINE) else f'{origin}: '}{key} {problem}")
    for key in texts_with_userinfo(dataclasses.asdict(config), ""):
        key = key.removeprefix(".")
        variable = next(name for start, name in KEY_OF.items() if key.startswith(start))
        raise ConfigError(f"{key}: no name or password in an address, since a run keeps and shows it: {variable}")
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
