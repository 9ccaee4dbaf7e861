"""Values that no run can use, refused by key however the config was made: by a file, a command line or in Python."""

import dataclasses
import re
from collections.abc import Mapping

from turnwise.config import Config, LearnerConfig, SamplingConfig
from turnwise.config.choices import LearnerPlace
from turnwise.config.evaluation_sampling import evaluation_sampling
from turnwise.config.knobs import problems
from turnwise.config.sections import extension_sections, knob_for, section
from turnwise.config.training import is_share
from turnwise.errors import ConfigError
from turnwise.errors.address_passwords import texts_with_userinfo
from turnwise.errors.nearest_name import unknown
from turnwise.extensions import extensions, named

DEFAULT, COMMAND_LINE = "default", "command line"
_ELSEWHERE = "keep it in a variable of the environment"
"""Where the key of an address belongs, of which no knob says more."""
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
        advice = _where_its_key_belongs(key)
        raise ConfigError(f"{key}: no name or password in an address (a run stores and shows it); {advice}")
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
    _check_learner(config.learner)
    for kind in extension_sections().values():
        if hasattr(kind, "check"):
            section(config, kind).check()


def _where_its_key_belongs(key: str) -> str:
    for record in extensions().values():
        for start, advice in record.keys_of_options.items():
            if key.startswith(start):
                return advice
    knob = knob_for(key)
    return str(knob.marks.get("key_in", _ELSEWHERE)) if knob is not None else _ELSEWHERE


def _check_sampling(sampling: SamplingConfig, section: str) -> None:
    if 0 < sampling.temperature < SMALLEST_TEMPERATURE:
        raise ConfigError(
            f"{section}.temperature must be 0 (greedy) or at least {SMALLEST_TEMPERATURE}, not {sampling.temperature}"
        )
    if "" in sampling.stop:
        raise ConfigError(f"{section}.stop: an empty text would end every turn at once")


def _check_learner(learner: LearnerConfig) -> None:
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", learner.device):
        raise ConfigError(f"learner.device must be auto, cpu, cuda or cuda:N, not {learner.device!r}")
    for name in ("routing_replay", "router_loss"):
        if getattr(learner, name) and learner.processes > 1:
            raise ConfigError(f"learner.{name} needs learner.processes=1: ranks do not look at routers")
    if learner.routing_replay and learner.place is LearnerPlace.process:
        raise ConfigError(
            "learner.routing_replay needs learner.place=here: it takes the experts of a sampler beside it"
        )


def _check_trackers(trackers: list[str]) -> None:
    for name in trackers:
        if name not in (names := ["console", *named("trackers")]):
            raise ConfigError(f"tracking.to: {unknown('tracker', name, names)}")
        if trackers.count(name) > 1:
            raise ConfigError(f"tracking.to names {name!r} more than once")
