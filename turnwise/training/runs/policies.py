"""The policy that somebody wants to talk to: a run's, or a model's, with the config that goes with it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from turnwise.config import Config
from turnwise.config.check import COMMAND_LINE
from turnwise.config.compose import Composed, unread
from turnwise.data.task_config import compose
from turnwise.errors import ConfigError
from turnwise.storage.run_dir import CONFIG, RunDir
from turnwise.training.runs.trust import check_run, check_trust

HERE = ("engine=auto", "cluster=none")
"""A trained policy is talked to in this process, wherever its run was sampled, unless the command says otherwise."""


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """What was named: `NamedPolicy("first", config)`, whose `model.path` is the policy."""

    name: str
    config: Config


def find_policy(
    name: str | None,
    overrides: Sequence[str],
    config_file: Path | None,
    *,
    trusted: bool,
    fixed: Sequence[str] = (),
    read: tuple[str, ...] = ("",),
) -> NamedPolicy:
    """The policy of a run's folder, or the model of this path; without a name the configured model.

    `fixed` are values the command sets itself, `read` is how the keys begin that it reads of a run that was sent.
    """
    if name is None or not (Path(name) / CONFIG).is_file():
        composed = compose([*fixed, *overrides], config_file)
        _check(composed, name)
        model = composed.config.model
        config = composed.config if name is None else replace(composed.config, model=replace(model, path=name))
        return NamedPolicy(Path(config.model.path).name, config)
    run = RunDir.open(Path(name))
    check_run(run, trusted=trusted)
    policy = newest_policy(run)
    own = fixed if policy is None else [*HERE, *fixed]
    composed = compose([*own, *overrides], config_file, recorded=run.path / CONFIG)
    _check(composed, name)
    config = composed.config
    if policy is not None:
        config = replace(config, model=replace(config.model, path=str(policy)))
    check_trust(run, config, compose([*own, *overrides], config_file).config, trusted=trusted, section=read)
    return NamedPolicy(run.path.resolve().name, config)


def newest_policy(run: RunDir) -> Path | None:
    """The folder of the policy that a run made: what it ships, or else its newest checkpoint's."""
    folders = [run.path / "policy", *sorted(run.path.glob("checkpoints/step_*/policy"), reverse=True)]
    return next((folder for folder in folders if (folder / "config.json").is_file()), None)


def _check(composed: Composed, name: str | None) -> None:
    if name is not None and composed.origins["model.path"] == COMMAND_LINE:
        raise ConfigError(
            f"the policy is named twice, {name!r} and model.path={composed.config.model.path}: leave one out"
        )
    if problems := unread(composed):
        raise ConfigError("; ".join(problems))
