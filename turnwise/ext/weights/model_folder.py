"""A Hugging Face folder written tensor by tensor beside its place and renamed at the end, with what proves it whole."""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turnwise.engines.model.huggingface_folder import DTYPE_NAMES, read_raw_config
from turnwise.engines.model.tensor_file import write_made
from turnwise.errors import ConfigError, StorageError
from turnwise.ext.weights.expected_tensors import check_numbers
from turnwise.ext.weights.lazy_tensor import Stored
from turnwise.system.files import cannot, replacing

MANIFEST = "turnwise_weights.json"
"""What a folder was made of, and its files with their sizes; a folder without it was made by others."""
CARRIED = (".json", ".jinja", ".txt", ".model", ".py", ".md", ".tiktoken", ".vocab", ".spm")
"""Endings of the files beside a model's weights: config, tokenizer, templates, processors, code of its own, a card."""
TEMPLATES = "additional_chat_templates"
Advance = Callable[[int], None]
"""Told how many bytes were written."""


@dataclass(frozen=True, slots=True)
class Form:
    """How weights are written: `Form(torch.bfloat16)`; None keeps the number format that each tensor has."""

    dtype: torch.dtype | None = None
    largest: int = 5_000_000_000
    """Bytes of one file; a larger tensor has one to itself."""

    def of(self, stored: Stored) -> torch.dtype:
        """The number format a tensor gets; integers stay what they are."""
        return self.dtype if self.dtype is not None and stored.dtype.is_floating_point else stored.dtype


@contextlib.contextmanager
def appearing(target: Path, force: bool, *kept: Path) -> Iterator[Path]:
    """A folder to fill that takes the name `target` only when the block ends well; `kept` must not be in its way.

    What a killed process left is removed: while it lives it holds a lock on its folder.
    """
    check_target(target, force, *kept)
    _sweep(target)
    temporary = target.parent / f".{target.name[:100]}.{secrets.token_hex(4)}.tmp"
    try:
        temporary.mkdir(parents=True)
        descriptor = os.open(temporary, os.O_RDONLY)
    except OSError as error:
        raise cannot("write", temporary, error) from error
    try:
        with contextlib.suppress(OSError):  # a file system without locks: leftovers of others stay
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield temporary
        before = target.parent / f".{target.name[:100]}.{secrets.token_hex(4)}.tmp"
        os.fsync(descriptor)
        if target.exists() and any(target.iterdir()):
            os.replace(target, before)
        os.replace(temporary, target)
        shutil.rmtree(before, ignore_errors=True)
    except OSError as error:
        raise cannot("write", target, error) from error
    finally:
        os.close(descriptor)
        shutil.rmtree(temporary, ignore_errors=True)


def check_target(target: Path, force: bool, *kept: Path) -> None:
    """Refuse a place that is taken, or whose replacement would take away what is read."""
    own = target.resolve()
    for other in kept:
        if own == other.resolve() or own in other.resolve().parents:
            raise ConfigError(f"{target} is where {other} is read from; write to another place")
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise ConfigError(f"{target} exists and is not a folder")
    if not target.exists() or not any(target.iterdir()):
        return
    if not force:
        raise ConfigError(f"{target} exists; --force replaces it")
    if not any((target / name).exists() for name in (MANIFEST, "config.json", "huggingface", "adapter_config.json")):
        raise ConfigError(f"{target} exists and is not a model's folder: --force does not remove it")


def _sweep(target: Path) -> None:
    """Remove what processes that were killed left beside the target."""
    for leftover in target.parent.glob(f".{_escaped(target.name[:100])}.*.tmp"):
        if not leftover.is_dir() or leftover.is_symlink():
            continue
        with contextlib.suppress(OSError):  # somebody is writing it, or there are no locks to tell
            descriptor = os.open(leftover, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(leftover, ignore_errors=True)
            finally:
                os.close(descriptor)


def _escaped(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


# --- weights --------------------------------------------------------------------------------------------------------


def write_weights(folder: Path, tensors: Mapping[str, Stored], form: Form, where: str, advance: Advance) -> None:
    """One safetensors file, or several with an index; at most one tensor is in memory."""
    files: list[list[str]] = [[]]
    held = total = 0
    for name, stored in tensors.items():
        size = stored.bytes // stored.dtype.itemsize * form.of(stored).itemsize
        if files[-1] and held + size > form.largest:
            files.append([])
            held = 0
        files[-1].append(name)
        held += size
        total += size

    def make(name: str) -> Tensor:
        stored = tensors[name]
        tensor = stored.read().to(form.of(stored))
        check_numbers(name, tensor, stored.dtype, where)
        advance(tensor.nbytes)
        return tensor

    many = len(files)
    home: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = "model.safetensors" if many == 1 else f"model-{number:05d}-of-{many:05d}.safetensors"
        formats = {name: (form.of(tensors[name]), tensors[name].shape) for name in names}
        write_made(folder / file, formats, make, {"format": "pt"})
        home |= dict.fromkeys(names, file)
    if many > 1:
        write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": home})


def write_json(path: Path, table: Mapping[str, Any]) -> None:
    """A JSON file, whole or not at all."""
    with replacing(path) as file:
        file.write((json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode())


# --- what stands beside them ----------------------------------------------------------------------------------------


def carry(companions: Path, folder: Path, dtype: torch.dtype | None) -> None:
    """Copy config, tokenizer and templates; config.json says the number format the weights have now."""
    raw = read_raw_config(companions)
    for key in ("dtype", "torch_dtype"):
        if key in raw and dtype is not None:
            raw[key] = DTYPE_NAMES[dtype]
    places = [companions, companions / TEMPLATES]
    for path in (path for parent in places if parent.is_dir() for path in sorted(parent.iterdir())):
        name = path.relative_to(companions)
        if path.is_file() and path.suffix in CARRIED and not _of_weights(path.name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name)
    write_json(folder / "config.json", raw)


def _of_weights(name: str) -> bool:
    return name.startswith(".") or name.endswith(".index.json") or name in (MANIFEST, "adapter_config.json")


def one_format(tensors: Mapping[str, Stored], form: Form) -> torch.dtype | None:
    """The number format of all tensors, where they have one that config.json can name."""
    formats = {form.of(stored) for stored in tensors.values() if stored.dtype.is_floating_point}
    return formats.pop() if len(formats) == 1 and formats <= DTYPE_NAMES.keys() else None


# --- proof ----------------------------------------------------------------------------------------------------------


def write_manifest(folder: Path, made_of: Mapping[str, Any]) -> None:
    """The last file of a folder: what it was made of, and the size of every other file."""
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    write_json(folder / MANIFEST, {"made_of": made_of, "files": sizes})


def missing_of(folder: Path, made_of: Mapping[str, Any]) -> str | None:
    """Why a folder is not what would be made now, or None: a file is gone or cut short, or the source changed."""
    path = folder / MANIFEST
    if not path.is_file():
        return f"it has no {MANIFEST}"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        sizes: dict[str, int] = dict(manifest["files"])
        for name, size in sizes.items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            if (folder / name).stat().st_size != size:
                return f"{name} is {(folder / name).stat().st_size} bytes, not {size}"
        same = manifest["made_of"] == json.loads(json.dumps(made_of))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StorageError(f"{path} cannot be read: {error!r}") from error
    return None if same else "its source or the options changed since"
