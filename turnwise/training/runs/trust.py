"""A run that somebody may have sent: nothing it names is imported, reached or written to unless we trust it.

A config.yaml is a program as soon as it names plug-ins. What a person says on the command line, or in a file given with
--config, was given; what only the run says needs `--trust-run`. The marks of the knobs say most of it
(`reached`); the rest is what only the readers of rows, models, options and files can tell.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from turnwise.config import Config, DataConfig, ScoringConfig
from turnwise.config.knobs import is_plugin, knobs_of
from turnwise.config.sections import complete, flat, full_config, value_of
from turnwise.data.files import Split, data_files, is_on_the_hub
from turnwise.data.images.cells import ImageCells
from turnwise.data.rows import Row, read_rows
from turnwise.data.samples import to_sample
from turnwise.engines.model.hub import is_hub_id
from turnwise.errors import ConfigError, DataError
from turnwise.extensions import named, reaching
from turnwise.scoring.client_options import contacts_others, declared_options
from turnwise.scoring.scorer import builtin_scorers
from turnwise.storage.configs import read_config
from turnwise.storage.images.copies import is_kept
from turnwise.storage.own_runs import is_own
from turnwise.storage.run_dir import CONFIG, RunDir
from turnwise.system.plugins import names_in, plain_options
from turnwise.types import Sample

FLAG = "--trust-run"
MOST_NAMED = 6
LONGEST = 300
_LOOPS, _USERS = "turnwise.rollout.loops", "turnwise.rollout.users"


def check_run(run: RunDir, *, trusted: bool) -> None:
    """Before a run's config is composed: refuse one that explodes, reads the environment, or lies beside links."""
    text, _ = read_config(run)  # StorageError for a file that is too long, too deep or unfolds without end
    if trusted:
        return
    variables = ["${...}, which may read the environment"] if "${" in text else []
    _refuse(run, [*variables, *_links(run.path)])


def check_trust(
    run: RunDir, config: Config, command: Config, *, trusted: bool, section: str | tuple[str, ...] = ""
) -> None:
    """Refuse a config that reaches for what the command did not name; `section` is how the keys begin that are read.

    What the config of one's own run names, one has named oneself. Of its rows that is not known.
    """
    if trusted:
        return
    named = set(reaches(command, run.path.parent))
    own = is_own(run)
    new = [entry for entry in reaches(config, run.path.parent) if entry not in named and not own]
    entries = (*new, *_plugins_of_rows(config.data, command.data))
    _refuse(run, [entry for entry in entries if entry.startswith(section)])


def check_sample(run: RunDir, sample: Sample, *, trusted: bool) -> None:
    """Refuse to play a recorded sample again that names what was not told: a record is the run's word too."""
    if trusted:
        return
    if plugin := _plugin_of(sample):
        _refuse(run, [f"the recorded sample {sample.id} names {plugin}"])
    # A file of whoever plays it again, if the run was sent; one that the run has a copy of tells nobody anything.
    if file := next((name for name in _image_files(sample) if not is_kept(run, name)), None):
        _refuse(run, [f"the recorded sample {sample.id} names the image file {file}"])


def _image_files(sample: Sample) -> Iterator[str]:
    """Images that are not in the record itself: what the model is shown, and what tools look at."""
    sources = [image.source for message in sample.prompt for image in message.images]
    sources += [image.source for image in sample.images]
    for kwargs in sample.tools_kwargs.values():
        created = kwargs.get("create_kwargs")
        own = created.get("image") if isinstance(created, Mapping) else None
        for image in own if isinstance(own, list) else [own]:
            file = image.get("image", image.get("path")) if isinstance(image, Mapping) else image
            sources += [file] if isinstance(file, str) else []
    yield from (source for source in sources if not source.startswith("data:"))


def needs_trust(config: Config, run: RunDir) -> bool:
    """Whether a run with this config is resumed only when it is trusted."""
    try:
        return (bool(reaches(config, run.path.parent)) and not is_own(run)) or any(
            _plugins_of_rows(config.data, DataConfig())
        )
    except DataError:  # a file that has changed since: nobody knows what it names now
        return True


def reaches(config: Config, place: Path) -> list[str]:
    """`key=value` of all that leads to code, addresses, the environment or out of the sandbox.

    Files of rows count where they came with the run, in the folder `place`.
    """
    entries = (*reached(config), *_model(config), *_data(config.data, place), *_agent_options(config))
    return [f"{key}={value}" for key, value in (*entries, *_interaction(config), *_scoring(config.scoring))]


def _model(config: Config) -> Iterator[tuple[str, Any]]:
    path = config.model.path
    if is_hub_id(path) and not (Path(path).is_dir() or Path(path).is_file()):  # it would be downloaded
        yield "model.path", path
    if config.model.trust_remote_code:
        yield "model.trust_remote_code", f"true, for model.path={path}"


def _data(data: DataConfig, place: Path) -> Iterator[tuple[str, Any]]:
    for key, files in (("data.train_files", data.train_files), ("data.eval_files", data.eval_files)):
        yield from ((key, name) for name in files if _lies_in(name, place) or is_on_the_hub(name))
    if data.images_from is not None and _lies_in(data.images_from, place):
        yield "data.images_from", data.images_from


def _agent_options(config: Config) -> Iterator[tuple[str, Any]]:
    rollout, in_files = config.rollout, any(value_of(config, key) for key in named("loop_files"))
    # Whichever loop is set: rows may name another one.
    plain = frozenset[str]().union(*(plain_options(_LOOPS, name) for name in names_in(_LOOPS)))
    plain = frozenset() if in_files or is_plugin(rollout.agent or "") else plain
    options = rollout.agent_options
    yield from ((f"rollout.agent_options.{name}", options[name]) for name in options if name not in plain)


def _interaction(config: Config) -> Iterator[tuple[str, Any]]:
    rollout, in_files = config.rollout, any(value_of(config, key) for key in named("user_files"))
    options = rollout.interaction_kwargs
    if in_files or is_plugin(rollout.interaction or ""):
        if options:
            yield "rollout.interaction_kwargs", options
    elif rollout.interaction is not None:
        plain = plain_options(_USERS, rollout.interaction)
        yield from ((f"rollout.interaction_kwargs.{name}", options[name]) for name in options if name not in plain)


def _plugins_of_rows(data: DataConfig, command: DataConfig) -> Iterator[str]:
    """Rows may lead elsewhere too, wherever their file lies: of each that only the run names, the first that does."""
    for key in ("train_files", "eval_files"):
        for name in getattr(data, key):
            if name in getattr(command, key) or is_on_the_hub(name):
                continue
            for row in _rows(name, Split.TRAIN if key == "train_files" else Split.EVAL):
                sample = to_sample(
                    row,
                    prompt_key=data.prompt_key,
                    default_source=data.default_source,
                    images=ImageCells(data.images_from),
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
    """What leads a sample to code or to an address; code of its own it cannot name (rollout/routing.py)."""
    names = reaching()
    extra = sample.info.get("extra_info")
    if isinstance(extra, Mapping) and (key := next((name for name in extra if name in names), None)):
        return f"an environment of {key}"
    user = sample.interaction and sample.interaction.name
    chosen = [*(("tool", name) for name in sample.tools or ()), ("agent loop", sample.agent), ("interaction", user)]
    return next((f"the {kind} {name}" for kind, name in chosen if name in names), None)


def _scoring(scoring: ScoringConfig) -> Iterator[tuple[str, Any]]:
    for source, name in scoring.scorers.items():
        if name not in builtin_scorers() or name in reaching() or contacts_others(name):
            yield f"scoring.scorers.{source}", name
    ours = all(
        name in builtin_scorers() for name in scoring.scorers.values()
    )  # a key may mean a plug-in of the same name
    for scorer, options in scoring.options.items():
        if not isinstance(options, Mapping):
            yield f"scoring.options.{scorer}", options
            continue
        harmless = declared_options(scorer) if ours and scorer in builtin_scorers() else frozenset()
        yield from ((f"scoring.options.{scorer}.{key}", value) for key, value in options.items() if key not in harmless)


def _lies_in(name: str, folder: Path) -> bool:
    return "\0" in name or Path(name).expanduser().resolve().is_relative_to(folder.resolve())


def _links(folder: Path) -> Iterator[str]:
    """Links that lead out of a run, where what is written to it would be written; and pipes, which would hold us."""
    for parent, folders, files in os.walk(folder):  # links to folders are named, not followed
        folders.sort()
        for entry in (Path(parent, name) for name in sorted([*folders, *files])):
            name = entry.relative_to(folder)
            if entry.is_symlink():
                if not entry.resolve().is_relative_to(folder.resolve()):
                    yield f"{name} -> {os.readlink(entry)}"
            elif not entry.is_file() and not entry.is_dir():
                yield f"{name}, which is not a file"


def _refuse(run: RunDir, entries: list[str]) -> None:
    if not entries:
        return
    names = "; ".join(entry if len(entry) <= LONGEST else entry[:LONGEST] + "..." for entry in entries[:MOST_NAMED])
    more = f"; and {len(entries) - MOST_NAMED} more" if len(entries) > MOST_NAMED else ""
    raise ConfigError(
        f"{run.path / CONFIG} asks to import, contact or open this: {names!r}{more}. If you made this run or "
        f"trust whoever did, add {FLAG}; or set these keys on the command line"
    )


def reached(config: Config) -> Iterator[tuple[str, Any]]:
    """(key, value) of every knob, and of every entry of a list, that reaches something by itself.

    Whether a knob is read makes no difference. What only its reader can tell is told by the other functions here.
    """
    config, words = complete(config), flat(config)
    for key, knob in knobs_of(full_config()).items():
        value = value_of(config, key)
        if knob.reach is None:  # an extension's, whose writer does not say what its texts lead to
            is_text = knob.hint is str or knob.is_list or knob.is_dict
            yield from [(key, words[key])] if is_text and value != knob.default else ()
        elif knob.reach.by is None:
            continue
        elif knob.is_list and not knob.reach.whole:
            yield from ((key, entry) for entry in value if knob.reach.by(entry))
        elif value is not None and knob.reach.by(value):
            yield key, words[key]
