"""The entry of verl's agent-loop YAML and the config of ours that it names, checked before the first episode."""

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.config.check import COMMAND_LINE, DEFAULT
from turnwise.config.compose import ENVIRONMENT, Composed, unread
from turnwise.config.strict_yaml import read_yaml
from turnwise.data.task_config import compose
from turnwise.errors import ConfigError
from turnwise.errors.nearest_name import unknown

READ = ("rollout.", "scoring.", "sandbox.", "chat.", "verl.")
READ_KEYS = ("task", "seed", "sampling.max_tokens", "sampling.stop", "data.default_source")
"""What our config may say inside verl; all else is the trainer's affair, and refused rather than ignored."""
NOT_READ = (
    "max_assistant_turns",
    "max_user_turns",
    "tool_config_path",
    "function_tool_path",
    "interaction_config_path",
)
"""Of verl's rollout.multi_turn: what its own loops read, and ours does not."""


class Reward(enum.StrEnum):
    """Who says what an episode is worth."""

    turnwise = "turnwise"
    """Our scorers, as scoring.scorers names them."""
    verl = "verl"
    """verl's reward function or model: `reward_score` is left open."""


class OnFailure(enum.StrEnum):
    """What becomes of a sample whose episode or scoring failed."""

    stop = "raise"
    """The error is raised, and verl's trainer does with it as with that of any loop."""
    mask = "mask"
    """Its tokens are given back with a mask of zeros and a reward of 0; the log and `extra_fields` say why."""


@dataclass(frozen=True, slots=True)
class InsideEntry:
    """The options of one entry of the agent-loop YAML, beside `name` and `_target_`."""

    turnwise_config: str | None = None
    """A YAML file of ours."""
    overrides: tuple[str, ...] = ()
    """key=value, over the file."""
    reward: Reward = Reward.turnwise
    on_failure: OnFailure = OnFailure.stop
    several_sequences: bool = False
    """Whether an episode of several sequences (branches, a history that was rewritten) is given back as a list, which
    only the trainers of verl.trainer.ppo.v1 take; otherwise it fails."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "InsideEntry":
        """The entry as the YAML has it; ConfigError for what it cannot mean."""
        where, names = "the agent-loop entry", [item.name for item in dataclasses.fields(cls)]
        for key in settings:
            if key not in names:
                raise ConfigError(f"{where}: {unknown('key', key, names)}")
        file, overrides = settings.get("turnwise_config"), settings.get("overrides") or []
        if not isinstance(file, str | None):
            raise ConfigError(f"{where}: turnwise_config is the path of a YAML file, not {file!r}")
        if not isinstance(overrides, list) or not all(isinstance(item, str) for item in overrides):
            raise ConfigError(f"{where}: overrides is a list of texts such as 'rollout.max_user_turns=2'")
        several = settings.get("several_sequences", False)
        if not isinstance(several, bool):
            raise ConfigError(f"{where}: several_sequences is true or false, not {several!r}")
        reward, failure = settings.get("reward", Reward.turnwise), settings.get("on_failure", OnFailure.stop)
        for key, value, kind in (("reward", reward, Reward), ("on_failure", failure, OnFailure)):
            if value not in list(kind):
                raise ConfigError(f"{where}: {key}: {unknown('choice', str(value), [item.value for item in kind])}")
        return cls(file, tuple(overrides), Reward(reward), OnFailure(failure), several)

    def compose(self) -> Composed:
        """Our config. Only a task that it names is taken; what verl's trainer decides may not be set in it."""
        file = None if self.turnwise_config is None else Path(self.turnwise_config).expanduser()
        content = read_yaml(file) if file is not None and file.is_file() else None
        named = isinstance(content, dict) and "task" in content
        named = named or any(override.partition("=")[0] == "task" for override in self.overrides)
        try:
            composed = compose([*([] if named else ["task=null"]), *self.overrides], file)
        except ConfigError as error:
            raise ConfigError(f"the agent-loop entry: {str(error).removeprefix(f'{COMMAND_LINE}: ')}") from error
        origins = {key: origin for key, origin in composed.origins.items() if _is_given(origin)}
        if theirs := [key for key in origins if not key.startswith(READ) and key not in READ_KEYS]:
            read = ", ".join([*(f"{section}*" for section in READ), *READ_KEYS])
            raise ConfigError(
                f"{_of(origins[theirs[0]])}: {', '.join(theirs)}: verl's trainer decides that; read here are {read}"
            )
        if self.reward is Reward.verl and (ours := [key for key in origins if key.startswith("scoring.")]):
            raise ConfigError(
                f"{_of(origins[ours[0]])}: {', '.join(ours)}: never read where the entry has reward: verl"
            )
        if problems := unread(composed):
            raise ConfigError("; ".join(problems))
        return composed


def _of(origin: str) -> str:
    return "the agent-loop entry" if origin == COMMAND_LINE else origin


def _is_given(origin: str) -> bool:
    return origin != DEFAULT and not origin.startswith(("task ", ENVIRONMENT))


def unread_of_verl(rollout: Mapping[str, Any]) -> list[str]:
    """What verl's config says of its own loops that ours does not read: `multi_turn.max_user_turns=2`."""
    turns = rollout.get("multi_turn") or {}
    return [f"multi_turn.{name}={turns[name]}" for name in NOT_READ if turns.get(name) is not None]
