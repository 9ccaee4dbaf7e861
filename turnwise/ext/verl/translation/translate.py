"""A config of verl's as ours: every key with its fate (translated, not needed, unsupported) shown, then composed."""

import dataclasses
import enum
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from turnwise.config.compose import Composed, other_names
from turnwise.config.strict_yaml import parse_yaml, read_yaml, write_yaml
from turnwise.data.task_config import compose
from turnwise.errors import ConfigError, one_line
from turnwise.errors.address_passwords import without_userinfo
from turnwise.ext.verl.translation.minor_rules import RULES as SMALLER
from turnwise.ext.verl.translation.minor_rules import SWITCHES, switched_off
from turnwise.ext.verl.translation.rules import RULES
from turnwise.ext.verl.translation.shell_scripts import is_script, read_script
from turnwise.ext.verl.translation.values import Unsupported
from turnwise.storage.transcript import visible


def compose_foreign(file: Path, overrides: Sequence[str]) -> Composed:
    """What verl's config is here; what the command line says stands over it."""
    translation = translate(file, other_names())
    for note in translation.notes:
        sys.stdout.write(f"# {visible(' '.join(note.split()))}\n")
    for kind in FateKind:
        entries = [fate for fate in translation.fates if fate.kind is kind]
        sys.stdout.write(f"# {kind.value}: {len(entries)} keys\n")
        for fate in entries:
            line = f"{fate.key}={without_userinfo(str(fate.value))[:60]}: {fate.text}"
            sys.stdout.write(f"#   {visible(' '.join(line.split()))}\n")  # a line break would end the comment
    text = write_yaml(translation.tree())
    sys.stdout.write(f"{without_userinfo(text)}\n")
    with tempfile.TemporaryDirectory() as folder:
        ours = Path(folder, "config.yaml")
        ours.write_text(text, encoding="utf-8")
        composed = compose(overrides, ours)
    origins = {key: str(file) if origin == str(ours) else origin for key, origin in composed.origins.items()}
    return dataclasses.replace(composed, origins=origins)


_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?\s*([\w.]+)\s*(?:,[^{}]*)?\}")
"""Another key: from the top, or with a leading dot from the same section."""
_SHELL_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)\}")
_NOTHING = "nothing; "
_SWITCHES = {switch for switch, _ in SWITCHES.values()}
MOST_REFERENCES = 8
DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 1024, "data.max_prompt_length": 512, "data.max_response_length": 512,
    "actor_rollout_ref.rollout.n": 1, "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "actor_rollout_ref.actor.optim.lr": 1e-6, "actor_rollout_ref.actor.optim.weight_decay": 0.01,
    "algorithm.adv_estimator": "gae",
}  # fmt: skip
"""verl's own, where a file says nothing and ours would be another run."""
UNREAD = ("defaults", "hydra")
"""Sections that say how a file is put together, not what is run."""
SECTIONS = {
    "ray_kwargs.": "cluster=ray starts or joins a cluster; see ray.*",
    "ray_init.": "cluster=ray starts or joins a cluster; see ray.*",
    "global_profiler.": "every run records where its time goes",
    "transfer_queue.": "batches go to the learner by themselves",
    "skip.": "a run keeps every trajectory: `turnwise rescore` reads them again",
    "distillation.": "no teacher is asked",
    "actor_rollout_ref.ref.": "the reference is the policy before training, on the learner's device",
    "actor_rollout_ref.actor.fsdp_config.": "learner.processes over 1 shares out with FSDP2",
    "actor_rollout_ref.actor.megatron.": "learner.processes over 1 shares out with FSDP2",
    "actor_rollout_ref.actor.checkpoint.": "a checkpoint holds all that a resumed run needs",
    "actor_rollout_ref.actor.profiler.": "every run records where its time goes",
    "actor_rollout_ref.rollout.profiler.": "every run records where its time goes",
    "actor_rollout_ref.rollout.prometheus.": "the board has the engine's numbers",
    "actor_rollout_ref.rollout.engine_kwargs.": "servers.options has vLLM's and SGLang's own",
    "actor_rollout_ref.rollout.checkpoint_engine.": "weights go the cheapest way that the sampler takes",
    "actor_rollout_ref.rollout.disaggregation.": "a sampler reads prompts and writes turns",
    "actor_rollout_ref.rollout.trace.": "every turn and call is recorded",
    "actor_rollout_ref.model.mtp.": "tokens are drawn one by one",
    "actor_rollout_ref.rollout.mtp": "tokens are drawn one by one",
    "actor_rollout_ref.rollout.qat": "weights are trained as they are",
    "critic.": "the critic is a copy of the policy; see algorithm.value_loss, learner.critic_lr, learner.shared_critic",
    "reward_model.profiler.": "every run records where its time goes",
    "reward_model.model.": "reward_model.enable says it",
    "reward_model.rollout.": "reward_model.enable says it",
    "reward.reward_model.": "a reward model is asked by the scorer `judge`, or served and asked with scoring.run=http",
}
"""Whole sections that nothing is needed for."""


class FateKind(enum.Enum):
    """What became of a key of verl's config."""

    TRANSLATED = "translated"
    NOT_NEEDED = "not needed"
    NOT_SUPPORTED = "not supported"


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of one key of verl's."""

    key: str
    value: Any
    kind: FateKind
    text: str


@dataclass(slots=True)
class Translation:
    """Our values by key, and the fate of each of verl's keys."""

    values: dict[str, Any] = field(default_factory=lambda: {"task": None})
    fates: list[Fate] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """How a script was read."""

    def tree(self) -> dict[str, Any]:
        """The values by section, as a config file has them."""
        tree: dict[str, Any] = {}
        for key, value in self.values.items():
            *sections, name = key.split(".")
            branch = tree
            for section in sections:
                branch = branch.setdefault(section, {})
            branch[name] = value
        return tree


def translate(file: Path, names: Mapping[str, str]) -> Translation:
    """Read YAML, or a script that runs verl (`run.sh 8 out` with its words); `names` says what stands for a key."""
    translation = Translation()
    flat = dict(_flatten(_read(file, translation.notes)))
    settings = {key: _filled(value, flat, key.rpartition(".")[0]) for key, value in flat.items()}
    merged = {**DEFAULTS, **settings}
    for key, value in merged.items():
        fate = _fate(key, value, merged, names, translation.values)
        translation.fates.append(fate if key in settings else replace(fate, text=f"{fate.text} (verl's default)"))
    return translation


def _fate(key: str, value: Any, settings: Mapping[str, Any], names: Mapping[str, str], ours: dict[str, Any]) -> Fate:
    if key.split(".")[0] in UNREAD:
        return Fate(
            key, value, FateKind.NOT_SUPPORTED, "it is not read: put what it names into this file, or give its keys"
        )
    rule = RULES.get(key)
    if isinstance(value, str) and "$" in value and (rule is not None or key not in names):
        if rule is None and (section := _section(key)) is not None:
            return Fate(key, value, FateKind.NOT_NEEDED, section)
        return Fate(key, value, FateKind.NOT_SUPPORTED, f"{_unset(value)}: write the value itself")
    small = rule is None or rule is SMALLER.get(key)
    if small and key not in _SWITCHES and (off := switched_off(key, settings)) is not None:
        return Fate(key, value, FateKind.NOT_NEEDED, off)
    if value is None and rule is not None:
        return Fate(key, value, FateKind.NOT_NEEDED, "null, as if it were not there")
    if rule is None:
        return _without_rule(key, value, names)
    try:
        result = rule(value, settings)
    except Unsupported as error:
        return Fate(key, value, FateKind.NOT_SUPPORTED, str(error))
    except (TypeError, ValueError) as error:
        return Fate(key, value, FateKind.NOT_SUPPORTED, f"{value!r:.80} cannot be read: {one_line(error)}")
    if isinstance(result, str):
        return Fate(key, value, FateKind.NOT_NEEDED, result)
    ours |= result
    return Fate(key, value, FateKind.TRANSLATED, ", ".join(f"{name}={entry}" for name, entry in result.items()))


def _without_rule(key: str, value: Any, names: Mapping[str, str]) -> Fate:
    text = names.get(key)
    if key.endswith("._target_"):
        return Fate(key, value, FateKind.NOT_NEEDED, "a class of verl's own config")
    if value in (None, False, {}, []) and type(value) is not int:
        return Fate(key, value, FateKind.NOT_NEEDED, "it is off or empty")
    if text is not None and text.startswith(_NOTHING):
        return Fate(key, value, FateKind.NOT_NEEDED, text.removeprefix(_NOTHING))
    if text is not None:
        return Fate(key, value, FateKind.NOT_SUPPORTED, f"not carried over by itself; see {text}")
    if (section := _section(key)) is not None:
        return Fate(key, value, FateKind.NOT_NEEDED, section)
    return Fate(key, value, FateKind.NOT_SUPPORTED, "there is no equivalent here")


def _unset(value: str) -> str:
    names = dict.fromkeys(_SHELL_VARIABLE.findall(value))
    if not names:
        return "a variable that this file does not set"
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} set neither by the script nor in your environment"


def _section(key: str) -> str | None:
    return next((why for start, why in SECTIONS.items() if key.startswith(start)), None)


def _read(file: Path, notes: list[str]) -> Mapping[str, Any]:
    path, arguments = file, list[str]()
    if not file.is_file() and len(words := str(file).split()) > 1:
        path, arguments = Path(words[0]), words[1:]
    if not path.is_file():
        raise ConfigError(f"--from-verl: no file {path} (from {Path.cwd()})")
    if is_script(path):
        script = read_script(path, arguments)
        notes += script.notes
        return {key: _parsed(key, text) for key, text in script.overrides}
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values")
    return content


def _parsed(key: str, text: str) -> Any:
    try:
        return text if "$" in text else parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{key}={text[:80]}: {error}") from error


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        whole = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and whole != "data.apply_chat_template_kwargs":
            yield from _flatten(value, f"{whole}.")
        else:
            yield whole, value


def _filled(value: Any, flat: Mapping[str, Any], section: str, depth: int = 0) -> Any:
    """The value with ${another.key} filled in, where this file has that key."""
    if not isinstance(value, str) or depth > MOST_REFERENCES:
        return value

    def meant(match: re.Match[str]) -> Any:
        key = f"{section}{match[1]}" if match[1].startswith(".") else match[1]
        return _filled(flat[key], flat, key.rpartition(".")[0], depth + 1) if key in flat else match[0]

    whole = _REFERENCE.fullmatch(value)
    return meant(whole) if whole is not None else _REFERENCE.sub(lambda match: str(meant(match)), value)
