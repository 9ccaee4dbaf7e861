"""Rubrics: what a judge of tool turns is told to look for, by data source; bundled ones, YAML files, or a function."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from turnwise.errors import ConfigError, PluginError
from turnwise.errors.nearest_name import unknown
from turnwise.system.plugins import load
from turnwise.types import Sample

GENERAL = "general"
"""The rubric of a file for rows of data sources that no other one of it names."""
BUNDLED = Path(__file__).with_name("rubrics.yaml")
RubricChoice = str | Mapping[str, str]
_ENDINGS = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class Rubric:
    """One kind of question: `Rubric("counting", evidence="...", trace="...", sources=("IconQA",))`."""

    name: str
    evidence: str
    """About what the tools of one turn returned."""
    trace: str
    """About a whole attempt."""
    sources: tuple[str, ...] = ()


def rubric_of(sample: Sample, choice: RubricChoice | None = None) -> Rubric:
    """The rubric of a row's data source: None chooses among the bundled ones, a mapping by data source, then `default`.

    A choice is a bundled name, FILE.yaml (by its own `sources`), FILE.yaml:NAME, or FILE.py:function, which is given
    the sample and returns the text.
    """
    if choice is None:
        return _by_source(BUNDLED, sample.data_source)
    if isinstance(choice, Mapping):
        entry = choice.get(sample.data_source, choice.get("default"))
        if entry is None:
            raise ConfigError(
                f"tapo: rubric: {unknown('data source', sample.data_source, choice)} Add it, or a default."
            )
        choice = entry
    if not isinstance(choice, str) or not choice:
        raise ConfigError(
            f"tapo: a rubric is a name, FILE.yaml, FILE.yaml:NAME or FILE.py:function, not {choice!r:.60}"
        )
    return _named(choice, sample)


def _named(choice: str, sample: Sample) -> Rubric:
    if choice.endswith(_ENDINGS):
        return _by_source(Path(choice), sample.data_source)
    file, _, name = choice.rpartition(":")
    if not file and "." not in choice:
        return _entry(BUNDLED, choice)
    if file.endswith(_ENDINGS):
        return _entry(Path(file), name)
    text = load(choice, "rubric")(sample)
    if not isinstance(text, str) or not text.strip():
        raise PluginError(f"rubric {choice}: it returns the rubric's text, not {text!r:.60}")
    return Rubric(choice, text, text)


def _by_source(file: Path, data_source: str) -> Rubric:
    rubrics = read_rubrics(file)
    kind = next((rubric for rubric in rubrics.values() if data_source in rubric.sources), None)
    return kind or _entry(file, GENERAL)


def _entry(file: Path, name: str) -> Rubric:
    rubrics = read_rubrics(file)
    if name not in rubrics:
        raise ConfigError(f"tapo: {unknown('rubric', name, rubrics)}" + ("" if file == BUNDLED else f" ({file})"))
    return rubrics[name]


@functools.cache
def read_rubrics(file: Path) -> dict[str, Rubric]:
    """The rubrics of a YAML file by name, each with `evidence`, `trace` or both, and perhaps `sources`."""
    try:
        content = yaml.safe_load(file.expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"tapo: the rubrics of {file} cannot be read: {error}") from error
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"tapo: {file} is no mapping of rubrics by name")
    rubrics = {str(name): _rubric(str(name), entry, file) for name, entry in content.items()}
    named: dict[str, str] = {}
    for rubric in rubrics.values():
        for source in rubric.sources:
            if source in named:
                raise ConfigError(f"tapo: {file}: {source} is a source of {named[source]} and of {rubric.name}")
            named[source] = rubric.name
    return rubrics


def _rubric(name: str, entry: Any, file: Path) -> Rubric:
    where = f"tapo: {file}: {name}"
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: a rubric has evidence or trace, and perhaps sources")
    for key in entry:
        if key not in ("evidence", "trace", "sources"):
            raise ConfigError(f"{where}: {unknown('key', str(key), ['evidence', 'trace', 'sources'])}")
    texts = [entry[key] for key in ("evidence", "trace") if entry.get(key) is not None]
    sources = entry.get("sources", [])
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise ConfigError(f"{where}: evidence and trace are texts, and one of them is needed")
    if not isinstance(sources, list) or not all(isinstance(source, str) for source in sources):
        raise ConfigError(f"{where}: sources is a list of data sources")
    return Rubric(name, entry.get("evidence") or texts[0], entry.get("trace") or texts[0], tuple(sources))
