"""Where a model comes from: a bundled name, a Hugging Face folder, a GGUF file or a hub id; no weight is read here."""

from dataclasses import dataclass
from importlib import import_module, resources
from pathlib import Path

from turnwise.engines.model.hub import PICKLES, download, is_hub_id
from turnwise.errors import ConfigError, one_line
from turnwise.errors.nearest_name import meant
from turnwise.extensions import named
from turnwise.system.plugins import names_in

BUNDLED = "turnwise.engines.bundled"
"""The package whose folders are the bundled models."""
GGUF = ".gguf"
ADAPTER = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's files: `ModelSource("tiny", Path(".../models/tiny"))`."""

    name: str
    """As it was asked for: what `model.path` says."""
    folder: Path
    """A Hugging Face folder, or the one that `gguf_file` lies in."""
    gguf_file: str | None = None
    trust_remote_code: bool = False
    """Whether Python files of the model's own may be run."""
    on_hub: bool = False

    @property
    def path(self) -> Path:
        """The model's folder, or its file where it is a GGUF file."""
        return self.folder if self.gguf_file is None else self.folder / self.gguf_file

    @property
    def base(self) -> str:
        """What an adapter's config names as its base: the hub id, or the place on this machine."""
        return self.name.partition("@")[0] if self.on_hub else str(self.path.resolve())

    @property
    def weight_bytes(self) -> int:
        """The size in bytes of the weights on disk."""
        files = self.folder.glob("*.safetensors") if self.gguf_file is None else [self.path]
        return sum(file.stat().st_size for file in files)


def find_model(path: str, trust_remote_code: bool = False) -> ModelSource:
    """The source that `model.path` means; a hub id is downloaded unless it is in the cache already."""
    ours = {name: f"{BUNDLED}.{name}" for name in names_in(BUNDLED)}
    bundled = ours | named("models", ours)
    if path in bundled:
        folder = Path(str(resources.files(import_module(bundled[path]))))
        return ModelSource(path, folder, trust_remote_code=trust_remote_code)
    try:
        target = Path(path).expanduser()
        is_folder, is_file = target.is_dir(), target.is_file()
    except (OSError, RuntimeError) as error:  # a name that is too long; ~ of nobody
        raise ConfigError(f"model.path: {path[:200]} cannot be looked up: {one_line(error)}") from error
    if is_folder:
        _check_folder(target)
        return ModelSource(path, target, trust_remote_code=trust_remote_code)
    if is_file:
        if target.suffix.lower() != GGUF:
            raise ConfigError(
                f"model.path: {path} is a file; give the Hugging Face folder it belongs to, or a GGUF file (.gguf)"
            )
        return ModelSource(path, target.parent, target.name, trust_remote_code)
    if is_hub_id(path):
        folder = download(path, code=trust_remote_code)
        _check_folder(folder)
        return ModelSource(path, folder, None, trust_remote_code, on_hub=True)
    raise ConfigError(f"model.path: {_missing(path, list(bundled))}")


def _missing(path: str, bundled: list[str]) -> str:
    """What a path that is not there looks like, and what could stand in its place."""
    others = f"bundled models: {', '.join(bundled)}; a hub id is OWNER/NAME or OWNER/NAME@REVISION"
    if path.lower().endswith(GGUF):
        return f"no such GGUF file: {path} (from {Path.cwd()}); {others}"
    if "/" in path or path.startswith(("~", ".")):
        return f"no such folder: {path} (from {Path.cwd()}); {others}"
    hint = meant(path, bundled)
    return f"no such folder or bundled model: {path!r}{hint and f': {hint}'} ({others})"


def _check_folder(folder: Path) -> None:
    """Refuse a folder that is not one of a model, and say what it is instead."""
    if (folder / "config.json").is_file():
        if (folder / ADAPTER).exists():  # transformers would put it on the model without a word, native would not
            raise ConfigError(
                f"model.path: {folder} holds a model and an adapter, and it is unclear which is meant: merge them, or "
                f"take {ADAPTER} away"
            )
        return
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise ConfigError(f"model.path: {folder} cannot be read: {error.strerror or error}") from error
    message = f"model.path: {folder} has no config.json; it must be a Hugging Face model folder"
    if files := [name for name in names if name.lower().endswith(GGUF)]:
        raise ConfigError(f"{message}, or name its GGUF file: model.path={folder / files[0]}")
    if ADAPTER in names:
        raise ConfigError(f"{message}, not an adapter: use the policy folder beside it, where it is merged")
    if inside := [name for name in names if (folder / name / "config.json").is_file()]:
        raise ConfigError(f"{message}; {folder / inside[0]} is one")
    if pickles := [name for name in names if name.endswith(PICKLES)]:
        raise ConfigError(f"{message} with safetensors, and {pickles[0]} is a pickle")
    raise ConfigError(message)
