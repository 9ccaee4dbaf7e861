"""Values that no run can use, refused by key however the config was made: by a file, a command line or in Python."""

import dataclasses
import re
from collections.abc import Mapping

from turnwise.config import Config, SamplingConfig
from turnwise.config.evaluation_sampling import evaluation_sampling
from turnwise.config.knobs import problems
from turnwise.config.sections import extension_sections, section
from turnwise.config.training import is_share
from turnwise.errors import ConfigError
from turnwise.errors.address_passwords import texts_with_userinfo
from turnwise.errors.nearest_name import unknown
from turnwise.extensions import named

DEFAULT, COMMAND_LINE = "default", "command line"
KEY_OF = {
    "engine.base_url": "set OPENAI_API_KEY",
    "servers.addresses": "set TURNWISE_ENGINE_KEY",
    "sandbox.": "set TURNWISE_SANDBOX_TOKEN",
    "swe.": "set TURNWISE_SANDBOX_TOKEN",
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
        raise ConfigError(f"{key}: no name or password in an address (a run stores and shows it); {variable}")
    _check_sampling(config.sampling, "sampling")
    names = [field.name for field in dataclasses.fields(config.sampling)]
    for name in config.eval.sampling:
        if name not in names:
            raise ConfigError(f"eval.sampling: {unknown('key', name, names)}")
    evaluated = evaluation_sampling(config)
    for key, problem in problems(evaluated, "eval.sampling."):
        raise ConfigError(f"{key} {problem}")
    _check_sampling(evaluated, "eval.sampling")
    for name, options in config.scoring.options.items():
        if not isinstance(options, dict):
            raise ConfigError(f"scoring.options.{name} must be options by name, such as {{wrong: 0}}, not {options!r}")
    most, zone = config.rollout.max_tokens, config.algorithm.overlong_tokens
    if most is not None and zone > most:
        raise ConfigError(f"algorithm.overlong_tokens must be at most rollout.max_tokens={most}, not {zone}")
    training = config.training
    if training.target is not None and is_share(training.metric) and not 0 <= training.target <= 1:
        raise ConfigError(
            f"training.target must be at least 0 and at most 1, as {training.metric} is, not {training.target}"
        )
    _check_trackers(config.tracking.to)
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", config.learner.device):
        raise ConfigError(f"learner.device must be auto, cpu, cuda or cuda:N, not {config.learner.device!r}")
    for kind in extension_sections().values():
        if hasattr(kind, "check"):
            section(config, kind).check()


def _check_sampling(sampling: SamplingConfig, section: str) -> None:
    if 0 < sampling.temperature < SMALLEST_TEMPERATURE:
        raise ConfigError(
            f"{section}.temperature must be 0 (greedy) or at least {SMALLEST_TEMPERATURE}, not {sampling.temperature}"
        )
    if "" in sampling.stop:
        raise ConfigError(f"{section}.stop: an empty text would end every turn at once")


def _check_trackers(trackers: list[str]) -> None:
    for name in trackers:
        if name not in (names := ["console", *named("trackers")]):
            raise ConfigError(f"tracking.to: {unknown('tracker', name, names)}")
        if trackers.count(name) > 1:
            raise ConfigError(f"tracking.to names {name!r} more than once")
