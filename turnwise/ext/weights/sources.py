"""What lies in a folder of trained weights, where its config and tokenizer are, and its tensors by name."""

import enum
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from turnwise.engines.model.huggingface_folder import DecoderConfig, layout
from turnwise.errors import ConfigError, StorageError
from turnwise.ext.weights.distributed import HEAD, is_distributed, read_distributed
from turnwise.ext.weights.expected_tensors import Expected, expected_of
from turnwise.ext.weights.fsdp import is_fsdp, read_fsdp
from turnwise.ext.weights.lazy_tensor import Stored, read_safetensors
from turnwise.ext.weights.megatron import grid_folder, iteration_folder, read_megatron
from turnwise.ext.weights.megatron_distributed import is_megatron, read_distributed_megatron
from turnwise.ext.weights.megatron_layout import megatron_model
from turnwise.ext.weights.names import listed, plain_name

STEPS = ("global_step_*", "step_*")
"""How verl and Turnwise name the folders of a run's checkpoints."""
ACTOR, POLICY = "actor", "policy"
PREFERRED = ("", "model.", "policy.", "policy.model.")
"""What may stand before the names of a distributed checkpoint's weights, where its critic or optimiser repeats them."""


class CheckpointKind(enum.Enum):
    """The format of a checkpoint's files."""

    fsdp = "verl's FSDP shards"
    distributed = "a distributed checkpoint"
    megatron = "a Megatron grid"
    hugging_face = "a Hugging Face folder"


@dataclass(frozen=True, slots=True)
class SourceCheckpoint:
    """`SourceCheckpoint(CheckpointKind.fsdp, Path("global_step_8/actor"), Path("global_step_8/actor/huggingface"))`."""

    kind: CheckpointKind
    folder: Path
    companions: Path
    """The folder of its config.json, tokenizer and chat template."""

    def expected(self) -> Expected:
        """The tensors that the model of its config.json must have."""
        return expected_of(self.companions)

    def files(self) -> dict[str, list[int]]:
        """Size and time of everything that it is read from, to tell whether it changed since."""
        try:
            return {
                str(path.relative_to(folder)): [path.stat().st_size, path.stat().st_mtime_ns]
                for folder in (self.companions, self.folder)
                for path in sorted(folder.rglob("*"))
                if path.is_file()
            }
        except OSError as error:  # a run that goes on removes old checkpoints
            raise StorageError(f"{self.folder} changed while it was read: {error}") from error


def find_checkpoint(root: Path, companions: Path | None) -> SourceCheckpoint:
    """The checkpoint of a folder, or of the `actor` in it; `companions` is another folder for config and tokenizer."""
    if not root.is_dir():
        raise ConfigError(f"no such folder: {root}")
    try:
        recognised = _recognised(root) or (_recognised(root / ACTOR) if (root / ACTOR).is_dir() else None)
    except OSError as error:
        raise StorageError(f"{root} cannot be read: {error.strerror or error}") from error
    if recognised is None:
        steps = [path.name for pattern in STEPS for path in root.glob(pattern)]
        hint = f"; it has {listed(sorted(steps))}: name one, or --all" if steps else ""
        raise ConfigError(
            f"{root} holds no weights that are known here: neither model_world_size_W_rank_R.pt nor mp_rank_TT_PPP "
            f"nor {HEAD} nor model.safetensors{hint}"
        )
    kind, folder = recognised
    if companions is not None:
        if not (companions / "config.json").is_file():
            raise ConfigError(f"--hf {companions} has no config.json; it must be a Hugging Face model folder")
        return SourceCheckpoint(kind, folder, companions)
    near = [folder, folder.parent, folder.parent.parent] if folder != root else [folder, folder.parent]
    places = [beside for around in near for beside in (around / "huggingface", around / POLICY, around)]
    beside = next((each for each in places if (each / "config.json").is_file()), None)
    if beside is None:
        raise ConfigError(f"{folder} has no folder `huggingface` with a config.json beside its weights: give --hf")
    return SourceCheckpoint(kind, folder, beside)


def _recognised(root: Path) -> tuple[CheckpointKind, Path] | None:
    if is_fsdp(root):
        return CheckpointKind.fsdp, root
    grid = grid_folder(root)
    if grid is not None:
        return CheckpointKind.megatron, grid
    if _is_model(root / POLICY):  # a checkpoint of ours: the whole model, an adapter merged
        return CheckpointKind.hugging_face, root / POLICY
    for folder in (
        iteration_folder(root) or root,
        root,
        root / "dist_ckpt",
        root / "model" / "dist_ckpt",
        root / "model",
    ):
        if is_distributed(folder):
            return CheckpointKind.distributed, folder
    models = (root, root / "huggingface", root / "model" / "huggingface")
    return next(((CheckpointKind.hugging_face, folder) for folder in models if _is_model(folder)), None)


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def read_weights(checkpoint: SourceCheckpoint, expected: Expected) -> dict[str, Stored]:
    """The tensors under Hugging Face names, with LoRA factors among them where there are any; none is read yet."""
    match checkpoint.kind:
        case CheckpointKind.fsdp:
            return read_fsdp(checkpoint.folder, expected.in_memory())
        case CheckpointKind.megatron:
            return read_megatron(checkpoint.folder, megatron_model(expected, expected.where))
        case CheckpointKind.hugging_face:
            return read_safetensors(checkpoint.folder)
    tensors = read_distributed(checkpoint.folder)
    if is_megatron(tensors):
        return read_distributed_megatron(tensors, megatron_model(expected, expected.where), str(checkpoint.folder))
    return _named(tensors, expected, checkpoint.folder)


def _named(tensors: Mapping[str, Stored], expected: Expected, folder: Path) -> dict[str, Stored]:
    """The weights of a distributed checkpoint among all it holds: by Hugging Face names, or fused as in our decoder."""
    plain = {plain_name(name): stored for name, stored in tensors.items()}
    ways = [set(expected.in_memory()) - set(expected.tied), set(expected.shapes)]
    if expected.config is not None:
        ways.append({part.name for part in layout(expected.config)})
    for wanted in ways:
        anchor = max(wanted, key=len)
        prefixes = {name.removesuffix(anchor) for name in plain if name.endswith(anchor)}
        whole = sorted(prefix for prefix in prefixes if all(prefix + name in plain for name in wanted))
        chosen = next((prefix for prefix in PREFERRED if prefix in whole), whole[0] if len(whole) == 1 else None)
        if chosen is not None:
            own = {name.removeprefix(chosen): stored for name, stored in plain.items() if name.startswith(chosen)}
            weights = {name: stored for name, stored in own.items() if name in wanted or ".lora_" in name}
            fused = expected.config is not None and wanted == ways[-1] and wanted != ways[0]
            return _unfused(weights, expected.config, folder) if fused and expected.config is not None else weights
        if whole:
            raise StorageError(f"{folder} holds the model several times, under {listed(whole)}; save its weights alone")
    hint = f"; the whole model is in {folder.parent / POLICY}" if _is_model(folder.parent / POLICY) else ""
    raise StorageError(
        f"{folder} does not hold the model of {expected.where}/config.json; it has {listed(sorted(plain))}{hint}"
    )


def _unfused(tensors: Mapping[str, Stored], config: DecoderConfig, folder: Path) -> dict[str, Stored]:
    parts: dict[str, Stored] = {}
    for part in layout(config):
        stored, start = tensors[part.name], 0
        if stored.shape != part.shape:
            raise StorageError(f"{folder}: {part.name} is {stored.shape}, config.json says {part.shape}")
        for name, rows in part.sources:
            end = start + rows
            parts[name] = Stored(stored.dtype, (rows, *stored.shape[1:]), functools.partial(_rows, stored, start, end))
            start = end
    return parts


def _rows(stored: Stored, start: int, end: int) -> Tensor:
    return stored.read()[start:end]


def steps_in(base: Path) -> list[Path]:
    """The folders of a run's checkpoints, by step."""
    folders = {path for pattern in STEPS for path in base.glob(pattern) if path.is_dir()}
    numbered = [
        (int(path.name.rpartition("_")[2]), path) for path in folders if path.name.rpartition("_")[2].isdecimal()
    ]
    if not numbered:
        raise ConfigError(f"--all: {base} has no folders {' or '.join(STEPS)}")
    return [path for _, path in sorted(numbered)]
