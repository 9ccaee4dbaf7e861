"""The config of a command, with what its task sets below what the user does."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from turnwise.config import (
    AlgorithmConfig,
    ChatConfig,
    Config,
    DataConfig,
    EngineConfig,
    EvalConfig,
    LearnerConfig,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    ScoringConfig,
    SftConfig,
    TrackingConfig,
    TrainingConfig,
)
from turnwise.config.choices import Resume
from turnwise.config.compose import PROGRAM, Composed, compose_with
from turnwise.config.sections import flat, full_config
from turnwise.config.trees import changed, flatten, is_section, nest, over
from turnwise.data.task import config_values
from turnwise.errors import ConfigError


def compose(
    overrides: Sequence[str] = (),
    config_file: Path | None = None,
    *,
    recorded: Path | None = None,
    values: Mapping[str, Any] | None = None,
) -> Composed:
    """The config of a command. Every mistake is a ConfigError with the nearest valid name; torch is not imported.

    `recorded` is the config of a run that is resumed: what is not set anew stays as it was there. `values` is a
    tree that a program gives beside the overrides.
    """
    return compose_with(config_values, overrides, config_file, recorded=recorded, values=values)


Values = Mapping[str, Any]


class Sections(TypedDict, total=False):
    """What type checkers know that `configure` takes by name: the core's sections, as objects or as dicts, and the keys
    without a section. An extension's section stands in a dict: `configure({"sandbox": {...}})`."""

    task: str | None
    profile: str | None
    run: str | None
    runs_dir: str
    resume: Resume | str
    cluster: str
    seed: int
    model: ModelConfig | Values
    chat: ChatConfig | Values
    data: DataConfig | Values
    engine: EngineConfig | Values | str
    sampling: SamplingConfig | Values
    rollout: RolloutConfig | Values
    scoring: ScoringConfig | Values
    eval: EvalConfig | Values
    sft: SftConfig | Values
    training: TrainingConfig | Values
    algorithm: AlgorithmConfig | Values
    learner: LearnerConfig | Values
    tracking: TrackingConfig | Values


def configure(
    *overrides: str | Values | Config, config_file: str | Path | None = None, **sections: Unpack[Sections]
) -> Config:
    """The Config of what is set, for Python; every way of saying it may be mixed with the others.

    `configure("task=null", "training.steps=2")`, `configure({"training": {"steps": 2}})`,
    `configure(task=None, training=TrainingConfig(steps=2))`. Of a section that is given as an object, fields at their
    defaults say nothing: the task's and the profile's values stay.
    """
    if not isinstance(config_file, str | Path | None):
        raise ConfigError(f"config_file is a path, not {config_file!r}")
    given = [changed(value, PROGRAM) if isinstance(value, Config) else value for value in overrides]
    texts: Any = [value for value in given if not isinstance(value, Mapping)]
    values: dict[str, Any] = {}
    for tree in ({**sections}, *(value for value in given if isinstance(value, Mapping))):
        tree = nest(_of_their_kind(tree), PROGRAM)
        if twice := sorted(flatten(values).keys() & flatten(tree).keys()):
            raise ConfigError(f"{PROGRAM}: {twice[0]} is given twice")
        values = over(values, tree)
    return compose(texts, None if config_file is None else Path(config_file), values=values).config


def _of_their_kind(tree: Values) -> Values:
    """The tree; ConfigError where a section is another's object."""
    kinds = {field.name: field.type for field in dataclasses.fields(full_config())}
    for name, value in tree.items():
        kind = kinds.get(name)
        if not (is_section(value) and isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            continue
        if type(value) is not kind:
            raise ConfigError(f"{PROGRAM}: {name} is a {kind.__name__} or a dict, not a {type(value).__name__}")
    return tree


def differences(config_file: Path, config: Config) -> dict[str, tuple[Any, Any]]:
    """Keys whose value in a recorded config is another than now: {key: (then, now)}."""
    then, now = flat(compose([], recorded=config_file).config), flat(config)
    return {key: (then[key], now[key]) for key in now if then[key] != now[key]}
