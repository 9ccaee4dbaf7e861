"""A hub id becomes a folder in the local cache: safetensors only, with a progress bar for what must be fetched."""

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.errors import ConfigError

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Weights that run code when they are opened."""
COMPANIONS = (".json", ".jinja", ".txt", ".model")
MORE_TEMPLATES = "additional_chat_templates/"


def is_hub_id(path: str) -> bool:
    """Whether a path that leads nowhere here may be OWNER/NAME or OWNER/NAME@REVISION."""
    match = re.fullmatch(r"[\w-][\w.-]*/([\w-][\w.-]*)(@[\w-][\w./-]*)?", path, re.ASCII)
    return match is not None and not match[1].lower().endswith(".gguf")


@functools.cache
def download(name: str, *, code: bool) -> Path:
    """The folder of a hub model; `code` fetches its Python files too. Once a process: the answer must not change."""
    repository, _, revision = name.partition("@")
    try:
        info = _model_info(repository, revision or None)
    except ConnectionError as error:  # what was fetched before serves without a network
        if (folder := _cached(repository, revision or None)) is not None:
            return folder
        raise ConfigError(
            f"model.path: {name} is not a folder here (from {Path.cwd()}), it is not in the cache, and the hub cannot "
            f"be reached: {_first_line(error)}"
        ) from error
    wanted = _wanted(name, [each.rfilename for each in info.siblings or ()], code)
    folder = _cached(repository, info.sha)
    if folder is not None and all((folder / file).is_file() for file in wanted):
        return folder
    return _fetch(name, repository, revision or None, wanted)


def _model_info(repository: str, revision: str | None) -> "ModelInfo":
    """What the hub says of a model; ConnectionError when it cannot be asked."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name = repository if revision is None else f"{repository}@{revision}"
    try:
        return HfApi().model_info(repository, revision=revision)
    except HFValidationError as error:
        raise ConfigError(f"model.path: {name} is neither a folder here nor a hub id: {_first_line(error)}") from error
    except GatedRepoError as error:
        raise ConfigError(
            f"model.path: {name} is gated: ask for access on its page, then log in with `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"model.path: {repository} on the hub has no revision {revision}") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"model.path: {name} is not a folder here (from {Path.cwd()}), and the hub has no such model, or shows it "
            "only to those who log in (`hf auth login`)"
        ) from error
    except HfHubHTTPError as error:
        if error.response is not None and error.response.status_code < 500:
            raise ConfigError(f"model.path: the hub does not give {name}: {_first_line(error)}") from error
        raise ConnectionError(_first_line(error)) from error
    except _http_errors() as error:
        raise ConnectionError(_first_line(error)) from error


def _wanted(name: str, files: list[str], code: bool) -> list[str]:
    """The files a model is loaded from; a repository without safetensors is refused before anything is fetched."""
    here = [file for file in files if "/" not in file]
    weights = [file for file in here if file.endswith(".safetensors")]
    # Some repositories hold the same weights twice, under the names of their makers' own programs.
    weights = [file for file in weights if file.startswith("model")] or weights
    if not weights:
        if pickles := [file for file in files if file.endswith(PICKLES)]:
            raise ConfigError(
                f"model.path: {name} has no safetensors, only pickles such as {pickles[0]}, which run code when they "
                "are opened; look for a converted copy, or convert it where that does no harm"
            )
        if ggufs := [file for file in files if file.lower().endswith(".gguf")]:
            raise ConfigError(
                f"model.path: {name} has no safetensors, only GGUF files such as {ggufs[0]}; download one and name it: "
                f"model.path={Path(ggufs[0]).name}"
            )
        raise ConfigError(f"model.path: {name} on the hub has no safetensors: it is not a model that can be loaded")
    if "config.json" not in here:
        raise ConfigError(f"model.path: {name} on the hub has no config.json; it must be a Hugging Face model")
    companions = [file for file in here if file.endswith((*COMPANIONS, ".py") if code else COMPANIONS)]
    templates = [file for file in files if file.startswith(MORE_TEMPLATES) and file.endswith(".jinja")]
    return [*companions, *templates, *weights]


def _cached(repository: str, revision: str | None) -> Path | None:
    """The folder in the cache that has at least a config.json of this revision."""
    from huggingface_hub import try_to_load_from_cache

    file = try_to_load_from_cache(repository, "config.json", revision=revision)
    return Path(file).parent if isinstance(file, str) else None


def _fetch(name: str, repository: str, revision: str | None, wanted: list[str]) -> Path:
    """Fetch what is lacking; the client draws its progress on standard error."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=wanted))
    except _http_errors() as error:
        raise ConfigError(
            f"model.path: the download of {name} failed: {_first_line(error)}; what was fetched is kept, try again"
        ) from error


def _http_errors() -> tuple[type[Exception], ...]:
    """OSError, ValueError for an answer without sense, and what the client's HTTP library raises, whichever it is."""
    from huggingface_hub.errors import HfHubHTTPError

    return (ValueError, *(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)))


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0][:200]
    return text or type(error).__name__
