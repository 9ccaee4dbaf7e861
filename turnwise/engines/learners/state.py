"""What a learner keeps in a checkpoint: one file of named tensors with the rest as JSON in its head, without pickle."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from turnwise.engines.learners.critic import Critic
from turnwise.engines.model.policy_model import PolicyModel
from turnwise.engines.model.tensor_file import write_tensors
from turnwise.engines.opener import sharded_learners
from turnwise.errors import EngineError, StorageError

FILE = "learner.safetensors"
FORMAT = 2
"""Raised when names or their meaning change; a file of another format is refused by name."""
SHARDED = "learner"
"""The folder that a learner of several processes writes instead."""
_HEAD = "learner"
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, RecursionError, SafetensorError)


def holds_state(folder: Path) -> bool:
    """Whether a checkpoint has what a learner goes on from; without `training.save_last` the last one does not."""
    return (folder / FILE).exists() or (folder / SHARDED).is_dir()


def write_state(folder: Path, tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
    """The file appears whole or not at all."""
    head = {_HEAD: json.dumps({"format": FORMAT, **info})}
    write_tensors(folder / FILE, tensors, head)


def read_state(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `write_state` was given, or what a learner of several processes wrote."""
    path = folder / FILE
    if not path.exists() and (folder / SHARDED).is_dir():
        return sharded_learners().read_whole(folder)
    info = read_head(folder)
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, info  # noqa: SIM118 (no dict)
    except _UNREADABLE as error:
        raise StorageError(f"cannot read {path}: {error}") from error


def read_head(folder: Path) -> dict[str, Any]:
    """The JSON head of a saved learner state: its format, step and identity."""
    path = folder / FILE
    try:
        with safe_open(path, "pt") as file:
            head = json.loads((file.metadata() or {}).get(_HEAD, '{"format": 1}'))
    except _UNREADABLE as error:
        raise StorageError(f"cannot read {path}: {error}") from error
    return check_info(path, head, FORMAT)


def check_info(path: Path, info: Any, wanted: int) -> dict[str, Any]:
    """The same without its format, which must be the wanted one."""
    if not isinstance(info, dict):
        raise StorageError(f"cannot read {path}: no JSON object in its head")
    if info.get("format") != wanted:
        raise StorageError(
            f"{path} has format {info.get('format')} and this version of turnwise reads format {wanted}: go on "
            "with the version that wrote it, or start a new run from its folder `policy`"
        )
    if type(info.get("step")) is not int or info["step"] < 0:
        raise StorageError(f"{path} is after step {str(info.get('step'))[:100]}, which is not a number of steps")
    return {key: value for key, value in info.items() if key != "format"}


def differences(was: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """What changed, by its dotted name: `decoder.num_layers was 2 and is 4`."""
    changes: list[str] = []
    for key in sorted(was.keys() | now.keys()):
        old, new = was.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changes += differences(old, new, f"{prefix}{key}.")
        elif old != new:
            changes.append(f"{prefix}{key} was {repr(old)[:200]} and is {repr(new)[:200]}")
    return changes


def check_names(
    tensors: Mapping[str, Tensor], places: Mapping[str, Tensor], other: Callable[[str], torch.Size | None]
) -> None:
    """All of `places` must be there, with their shapes and number formats; `other` gives the shapes of what may be."""
    missing = sorted(places.keys() - tensors.keys())
    if missing:
        raise EngineError(f"the saved state lacks {', '.join(missing[:5])}")
    for name, tensor in tensors.items():
        shape = places[name].shape if name in places else other(name)
        if shape is None:
            raise EngineError(f"the saved state holds {name}, which this learner has no place for")
        if tensor.shape != shape or (name in places and tensor.dtype != places[name].dtype):
            actual = f"{tuple(tensor.shape)} {tensor.dtype}"
            raise EngineError(f"{name} is {actual} in the saved state and {tuple(shape)} here")


def below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Those whose names start so, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def bit_totals(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The sum of each tensor's bits as integers, which no order of summation changes."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return {
        name: int(tensor.detach().contiguous().view(kinds[tensor.element_size()]).sum(dtype=torch.int64))
        for name, tensor in tensors.items()
    }


Totals = Callable[[Mapping[str, Tensor]], Mapping[str, int]]


def fingerprint(tensors: Mapping[str, Tensor], totals: Totals = bit_totals) -> str:
    """A short digest of weights."""
    digest = hashlib.blake2b(digest_size=8)
    for name, total in sorted(totals(tensors).items()):
        digest.update(f"{name} {tuple(tensors[name].shape)} {total}\n".encode())
    return digest.hexdigest()


def identity(policy: PolicyModel, critic: Critic | None, totals: Totals = bit_totals) -> dict[str, Any]:
    """What must be equal for a state to fit; `totals` are taken of what is frozen."""
    frozen = {name: p for name, p in policy.named_parameters() if not p.requires_grad}
    facts = {
        **policy.facts,
        "base": fingerprint(frozen, totals) if frozen else None,
        "critic": None if critic is None else "shared" if critic.trunk is None else "own",
    }
    plain: dict[str, Any] = json.loads(json.dumps(facts))  # lists for tuples, as they come back from a file
    return plain
