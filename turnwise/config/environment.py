"""Variables of the environment that fill in what a config leaves open: each is read here, and told with what it does.

docs/environment.md lists them. A config that says something itself always stands; a variable that cannot be used where
it is needed is a ConfigError, and one that nobody needs is told too.
"""

import dataclasses
import glob
import os
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast
from urllib.parse import urlsplit

from turnwise import extensions
from turnwise.config import Config
from turnwise.config.sections import with_value
from turnwise.errors import ConfigError
from turnwise.errors.address_passwords import without_userinfo

MODEL = "BASE_MODEL_PATH"
DATA, CACHE = "DATA_REPO", "DATA_CACHE"
HUB = "HF_HOME"
_NAMED = (DATA, CACHE, HUB)


@dataclass(frozen=True, slots=True)
class Use:
    """One variable that is set: `Use("DATA_REPO", "/data", "data.train_files is there")`."""

    name: str
    value: str
    """As it may be shown; a secret is not."""
    effect: str
    used: bool = True

    def __str__(self) -> str:
        return f"{self.name}={self.value}: {self.effect}"


def value(name: str) -> str | None:
    """The variable's value; None where it is not set or empty. ConfigError for one that no text can be."""
    text = os.environ.get(name, "").strip()
    if not text.isprintable():
        raise ConfigError(f"the environment variable {name} has characters that cannot be used; a line break?")
    return text or None


def fill_in(config: Config, unset: Collection[str]) -> tuple[Config, dict[str, str]]:
    """The config with what the environment says of keys that nobody set, and the variable behind each key.

    Data files of relative paths that are not here are looked for in DATA_REPO, then in DATA_CACHE, whoever named them.
    """
    changed: dict[str, str] = {}
    if "model.path" in unset and extensions.engine(config.engine.name).renders and (named := _model()) is not None:
        name, path = named
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, path=path))
        changed["model.path"] = name
    data = dataclasses.replace(config.data)
    for key in ("train_files", "eval_files"):
        names: list[str] = getattr(data, key)
        placed = [_placed(file, f"data.{key}") for file in names]
        if variables := [variable for _, variable in placed if variable is not None]:
            setattr(data, key, [file for file, _ in placed])
            changed[f"data.{key}"] = variables[0]
    if data.images_from is not None:
        data.images_from, variable = _placed(data.images_from, "data.images_from")
        changed |= {} if variable is None else {"data.images_from": variable}
    config = dataclasses.replace(config, data=data)
    for module in dict.fromkeys(_brought().values()):
        for key, text, variable in module.fill_in(config):
            if key in unset:
                config, changed[key] = with_value(config, key, text), variable
    if (home := value(HUB)) is not None and _from_hub(config) and _exists(Path(home)) and not Path(home).is_dir():
        raise ConfigError(f"{HUB}={home} is not a folder, and model.path={config.model.path} would be stored there")
    return config, changed


def uses(config: Config) -> list[Use]:
    """Every variable of the page that is set, with what it does in a run of this config."""
    variables = []
    for name in (*_model_variables(), *_NAMED):
        if (text := value(name)) is not None:
            effect, used = _effect(name, text, config)
            variables.append(Use(name, without_userinfo(text), effect, used))
    return [*variables, *(module.use(name, config) for name, module in _brought().items())]


class VariablesOfExtension(Protocol):
    """The module that the table names for variables (`Extension.environment`)."""

    def fill_in(self, config: Config) -> Iterable[tuple[str, str, str]]:
        """(key, value, variable) of what they say; ConfigError for what the run would only stumble over later."""
        ...

    def use(self, name: str, config: Config) -> Use:
        """What one of them, which is set, does in a run of this config."""
        ...


def _brought() -> dict[str, VariablesOfExtension]:
    """The variables that are set and are an extension's, each with the module that reads it."""
    modules: dict[str, VariablesOfExtension] = {}
    for pattern, place in extensions.named("environment").items():
        names = sorted(name for name in os.environ if os.environ[name].strip() and fnmatchcase(name, pattern))
        modules |= dict.fromkeys(names, cast(VariablesOfExtension, import_module(place))) if names else {}
    return modules


def _model_variables() -> list[str]:
    return [MODEL, *(name for record in extensions.extensions().values() for name in record.model_variables)]


def data_folder(under: Path) -> Path:
    """Where `turnwise prepare` writes what it is not told a place for."""
    cache = value(CACHE)
    return under if cache is None else _folder(cache) / under


# --- one by one ---------------------------------------------------------------------------------------------------


def _model() -> tuple[str, str] | None:
    """(the variable, the model) that the environment names. All would be one: what samples is what is trained."""
    models = {name: model for name in _model_variables() if (model := value(name)) is not None}
    if len(set(models.values())) > 1:
        raise ConfigError(
            f"{' and '.join(f'{name}={model}' for name, model in models.items())} differ, and the sampler writes with "
            "the weights that are trained: set one of them, or model.path"
        )
    return next(iter(models.items()), None)


def _placed(file: str, key: str) -> tuple[str, str | None]:
    """(the file, the variable in whose folder it was found); as it was named where it is here, or nowhere."""
    roots = {name: root for name in (DATA, CACHE) if (root := value(name)) is not None}
    if not roots or Path(file).is_absolute() or file.startswith("~") or "://" in file or _matches(Path(file)):
        return file, None
    for name, root in roots.items():
        folder = _folder(root)
        if not folder.is_dir():
            raise ConfigError(f"{name}={root} is not a folder, and {key}={file} is not in {Path.cwd()} either")
        if _matches(folder / file):
            return str((folder / file).absolute()), name
    return file, None


def _effect(name: str, text: str, config: Config) -> tuple[str, bool]:
    """(what a variable does here, whether it does anything)."""
    if name in _model_variables():
        used = config.model.path == text
        return ("model.path" if used else f"not used, model.path={config.model.path} was given"), used
    if name in (DATA, CACHE):
        root = _folder(text).absolute()
        files = {"data.train_files": config.data.train_files, "data.eval_files": config.data.eval_files}
        there = [key for key, names in files.items() if any(Path(path).is_relative_to(root) for path in names)]
        prepared = "; `turnwise prepare` writes there" if name == CACHE else ""
        read = " and ".join(there) or "no data file"
        return f"{read} read there{prepared}", bool(there)
    used = _from_hub(config)
    storage = "hub models and datasets are kept there"
    return (storage if used else f"{storage}; model.path={config.model.path} is not one"), True


def _from_hub(config: Config) -> bool:
    """Whether the model may be one of the hub's: a name with an owner that leads nowhere here."""
    path = config.model.path
    return extensions.engine(config.engine.name).renders and "/" in path and not _exists(_folder(path))


def _folder(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:  # ~ of nobody
        return Path(path)


def _matches(path: Path) -> bool:
    """Whether it is there, or as a glob finds something."""
    try:
        return _exists(path) or bool(glob.glob(str(path), recursive=True))
    except (OSError, ValueError, re.error):
        return False


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that is too long, or has a null character: whoever reads it says so
        return False


def is_address(text: str) -> bool:
    """Whether a text is the address of a server."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0 and " " not in text
    except ValueError:
        return False


def told(config: Config) -> Iterator[str]:
    """The variables that are set, as lines of a plan."""
    for number, use in enumerate(uses(config)):
        yield f"{'' if number else 'environment':13}{use}"
