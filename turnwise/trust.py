"""What a run's folder would have us import, reach or write to: nothing of that unless we are told to trust the run.

A config.yaml is a program as soon as it names plug-ins, and a run may have been sent by somebody. What a person says on
the command line, or in a file given with --config, was given; what only the run says needs `--trust-run`.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from turnwise.choices import EngineName, SandboxLevel, ScoringRun, TrackerName
from turnwise.config import Config, DataConfig, RolloutConfig, SandboxConfig, ScoringConfig
from turnwise.config.inputs import FOREIGN
from turnwise.data.data_files import Split, data_files, is_on_the_hub
from turnwise.data.image_cells import ImageCells
from turnwise.data.rows import Row, read_rows
from turnwise.data.samples import to_sample
from turnwise.engines.model.hub import is_hub_id
from turnwise.errors import ConfigError, DataError
from turnwise.knobs import is_plugin
from turnwise.scoring.client_options import declared_options
from turnwise.scoring.scorer import BUILTIN
from turnwise.storage.images import is_kept
from turnwise.storage.run_dir import CONFIG, RunDir
from turnwise.types import Sample
from turnwise.web.configs import read_config

FLAG = "--trust-run"
OUR_SCRIPT = re.compile(r"turnwise\.tasks(\.\w+)+:script", re.ASCII)
SHOWN = 6
LONGEST = 300
_TRACKERS_HERE = (TrackerName.console.value, TrackerName.tensorboard.value)
"""The others send numbers to an account or an address that the environment names."""
_TOOLS_ELSEWHERE = ("retrieve",)
"""Built-in tools that send what the policy writes to an address that the environment names."""
_SCORERS_ELSEWHERE = ("judge", "tapo")
"""Built-in scorers that send episodes to a judge, whose address the environment names where no option does."""
_PLAIN_AGENT_OPTIONS = ("rounds", "trained", "tools", "system", "view", "reply")
"""Options of loops that name neither code nor an address, whichever loop is set: rows may name another one."""
_ENVIRONMENT = "verifiers"
"""In a row's extra_info: which environment of that package is imported and played (turnwise/compat/verifiers.py)."""
_PLAIN_INTERACTIONS = ("code_verify", "gsm8k")
_PLAIN_OPTIONS = {"scripted": frozenset({"turns", "right_by"})}
"""Built-in interactions, and options of one, that name neither a file nor an address."""


def check_run(run: RunDir, *, trusted: bool) -> None:
    """Before a run's config is composed: refuse one that explodes, reads the environment, or lies beside links."""
    text, _ = read_config(run)  # StorageError for a file that is too long, too deep or unfolds without end
    if trusted:
        return
    found = ["${...}, which may read the environment"] if "${" in text else []
    _refuse(run, [*found, *_links(run.path)])


def check_trust(run: RunDir, found: Config, given: Config, *, trusted: bool, section: str = "") -> None:
    """Refuse a config that reaches for what was not told, by name; `section` is all that will be read of it."""
    if trusted:
        return
    known = set(reaches(given, run.path.parent))
    new = [one for one in reaches(found, run.path.parent) if one not in known]
    _refuse(run, [one for one in (*new, *_plugins_of_rows(found.data, given.data)) if one.startswith(section)])


def check_sample(run: RunDir, sample: Sample, *, trusted: bool) -> None:
    """Refuse to play a recorded sample again that names what was not told: a record is the run's word too."""
    if trusted:
        return
    if plugin := _plugin_of(sample):
        _refuse(run, [f"the recorded sample {sample.id} names {plugin}"])
    # A file of whoever plays it again, if the run was sent; one that the run has a copy of tells nobody anything.
    if file := next((one for one in _image_files(sample) if not is_kept(run, one)), None):
        _refuse(run, [f"the recorded sample {sample.id} names the image file {file}"])


def _image_files(sample: Sample) -> Iterator[str]:
    """Images that are not in the record itself: what the model is shown, and what tools look at."""
    sources = [image.source for message in sample.prompt for image in message.images]
    sources += [image.source for image in sample.images]
    for kwargs in sample.tools_kwargs.values():
        created = kwargs.get("create_kwargs")
        own = created.get("image") if isinstance(created, Mapping) else None
        for one in own if isinstance(own, list) else [own]:
            named = one.get("image", one.get("path")) if isinstance(one, Mapping) else one
            sources += [named] if isinstance(named, str) else []
    yield from (source for source in sources if not source.startswith("data:"))


def needs_trust(config: Config, place: Path) -> bool:
    """Whether a run with this config, in the folder `place`, is resumed only when it is trusted."""
    try:
        return bool(reaches(config, place)) or any(_plugins_of_rows(config.data, DataConfig()))
    except DataError:  # a file that has changed since: nobody knows what it names now
        return True


def reaches(config: Config, place: Path) -> list[str]:
    """`key=value` of all that leads to code, addresses, the environment or out of the sandbox.

    Files of rows count where they came with the run, in the folder `place`.
    """
    return [
        f"{key}={value}" for key, value in (*_rollout(config, place), *_services(config), *_scoring(config.scoring))
    ]


def _rollout(config: Config, place: Path) -> Iterator[tuple[str, Any]]:
    rollout = config.rollout
    if config.task is not None and is_plugin(config.task):
        yield "task", config.task
    for name in rollout.tools:
        if is_plugin(name) or name in _TOOLS_ELSEWHERE:
            yield "rollout.tools", name
    yield from _agent_options(rollout)
    if rollout.client is not None:
        yield "rollout.client", rollout.client
        yield from (("rollout.client_env", name) for name in rollout.client_env)
    for key, named in (("rollout.agent", rollout.agent), ("rollout.interaction", rollout.interaction)):
        if named is not None and is_plugin(named):
            yield key, named
    if rollout.agents_file is not None:
        yield "rollout.agents_file", rollout.agents_file
    if config.data.dataset is not None:
        yield "data.dataset", config.data.dataset
    if config.sft.script is not None and not OUR_SCRIPT.fullmatch(config.sft.script):
        yield "sft.script", config.sft.script
    for key, named in (("algorithm.advantage", config.algorithm.advantage), ("algorithm.loss", config.algorithm.loss)):
        if is_plugin(named):
            yield key, named
    yield from _interaction(rollout)
    for key, files in (("data.train_files", config.data.train_files), ("data.eval_files", config.data.eval_files)):
        yield from ((key, name) for name in files if _lies_in(name, place) or is_on_the_hub(name))
    if config.data.images_from is not None and _lies_in(config.data.images_from, place):
        yield "data.images_from", config.data.images_from


def _agent_options(rollout: RolloutConfig) -> Iterator[tuple[str, Any]]:
    plain = () if rollout.agents_file or is_plugin(rollout.agent or "") else _PLAIN_AGENT_OPTIONS
    options = rollout.agent_options
    yield from ((f"rollout.agent_options.{name}", options[name]) for name in options if name not in plain)


def _interaction(rollout: RolloutConfig) -> Iterator[tuple[str, Any]]:
    if rollout.interactions_file is not None:
        yield "rollout.interactions_file", rollout.interactions_file
    options = rollout.interaction_kwargs
    if rollout.interactions_file or is_plugin(rollout.interaction or ""):
        if options:
            yield "rollout.interaction_kwargs", options
    elif rollout.interaction not in (None, *_PLAIN_INTERACTIONS):
        plain = _PLAIN_OPTIONS.get(str(rollout.interaction), frozenset())
        yield from ((f"rollout.interaction_kwargs.{name}", options[name]) for name in options if name not in plain)


def _plugins_of_rows(found: DataConfig, given: DataConfig) -> Iterator[str]:
    """Rows may lead elsewhere too, wherever their file lies: of each that only the run names, the first that does."""
    for key in ("train_files", "eval_files"):
        for name in getattr(found, key):
            if name in getattr(given, key) or is_on_the_hub(name):
                continue
            for row in _rows(name, Split.TRAIN if key == "train_files" else Split.EVAL):
                sample = to_sample(
                    row,
                    prompt_key=found.prompt_key,
                    default_source=found.default_source,
                    images=ImageCells(found.images_from),
                )
                if plugin := _plugin_of(sample):
                    yield f"data.{key}={name}, whose row {row.number} names {plugin}"
                    break


def _rows(name: str, split: Split) -> Iterator[Row]:
    """Of files that are there; whoever reads the others says so."""
    for path in data_files([name], split):
        if path.is_file():
            yield from read_rows(path)


def _plugin_of(sample: Sample) -> str | None:
    """What leads a sample to code or to an address; code of its own it cannot name (rollout/plan.py)."""
    if isinstance(extra := sample.info.get("extra_info"), Mapping) and _ENVIRONMENT in extra:
        return f"an environment of {_ENVIRONMENT}"
    return next((f"the tool {one}" for one in sample.tools or () if one in _TOOLS_ELSEWHERE), None)


def _services(config: Config) -> Iterator[tuple[str, Any]]:
    engine, sandbox = config.engine, config.sandbox
    if _is_on_the_hub(config.model.path):
        yield "model.path", config.model.path
    if config.model.trust_remote_code:
        yield "model.trust_remote_code", f"true, for model.path={config.model.path}"
    yield from (("tracking.to", name) for name in config.tracking.to if name not in _TRACKERS_HERE)
    if is_plugin(engine.name):
        yield "engine.name", engine.name
    if engine.name == EngineName.openai:
        yield "engine.base_url", engine.base_url
    if config.cluster.address is not None:
        yield "cluster.address", config.cluster.address
    if engine.name in FOREIGN:
        yield from (("engine.servers", url) for url in engine.servers)
        if engine.python is not None:
            yield "engine.python", engine.python
        if engine.server_options:  # they may name code, files and addresses
            yield "engine.server_options", engine.server_options
    if sandbox.url is not None:
        yield "sandbox.url", sandbox.url
    if sandbox.swe_url is not None:
        yield "sandbox.swe_url", sandbox.swe_url
    for key, level in (("sandbox.level", sandbox.level), ("sandbox.min_level", sandbox.min_level)):
        if level is SandboxLevel.L0:
            yield key, level.value
    yield from (("sandbox.preload", name) for name in sandbox.preload if name not in SandboxConfig().preload)


def _scoring(scoring: ScoringConfig) -> Iterator[tuple[str, Any]]:
    for source, name in scoring.scorers.items():
        if name not in BUILTIN or name in _SCORERS_ELSEWHERE:
            yield f"scoring.scorers.{source}", name
    if scoring.run is ScoringRun.http:
        yield "scoring.url", scoring.url
    ours = all(name in BUILTIN for name in scoring.scorers.values())  # a key may mean a plug-in of the same name
    for scorer, options in scoring.options.items():
        if not isinstance(options, Mapping):
            yield f"scoring.options.{scorer}", options
            continue
        harmless = declared_options(scorer) if ours and scorer in BUILTIN else frozenset()
        yield from ((f"scoring.options.{scorer}.{key}", value) for key, value in options.items() if key not in harmless)


def _is_on_the_hub(path: str) -> bool:
    """Whether a model would be downloaded: OWNER/NAME that is no folder or file here."""
    return is_hub_id(path) and not (Path(path).is_dir() or Path(path).is_file())


def _lies_in(name: str, place: Path) -> bool:
    return "\0" in name or Path(name).expanduser().resolve().is_relative_to(place.resolve())


def _links(folder: Path) -> Iterator[str]:
    """Links that lead out of a run, where what is written to it would be written; and pipes, which would hold us."""
    for place, folders, files in os.walk(folder):  # links to folders are named, not followed
        folders.sort()
        for entry in (Path(place, name) for name in sorted([*folders, *files])):
            name = entry.relative_to(folder)
            if entry.is_symlink():
                if not entry.resolve().is_relative_to(folder.resolve()):
                    yield f"{name} -> {os.readlink(entry)}"
            elif not entry.is_file() and not entry.is_dir():
                yield f"{name}, which is no file"


def _refuse(run: RunDir, found: list[str]) -> None:
    if not found:
        return
    shown = "; ".join(one if len(one) <= LONGEST else one[:LONGEST] + "..." for one in found[:SHOWN])
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    raise ConfigError(
        f"{run.path / CONFIG} would have this imported, reached or opened: {shown!r}{more}. If you made this run or "
        f"trust whoever did, add {FLAG}; or say it yourself on the command line"
    )
