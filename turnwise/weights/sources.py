"""What lies in a folder of trained weights, where its config and tokenizer are, and its tensors by name."""

import enum
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from turnwise.engines.model.checkpoint_format import DecoderConfig, layout
from turnwise.errors import ConfigError, StorageError
from turnwise.weights.distributed import HEAD, is_distributed, read_distributed
from turnwise.weights.expected import Expected, expected_of
from turnwise.weights.fsdp import is_fsdp, read_fsdp
from turnwise.weights.megatron import grid_folder, read_distributed_megatron, read_megatron
from turnwise.weights.megatron_layout import refuse_other_families
from turnwise.weights.names import listed, plain_name
from turnwise.weights.stored import Stored, read_safetensors

STEPS = ("global_step_*", "step_*")
"""How verl and Turnwise name the folders of a run's checkpoints."""
ACTOR, POLICY = "actor", "policy"
PREFERRED = ("", "model.", "policy.", "policy.model.")
"""What may stand before the names of a distributed checkpoint's weights, where its critic or optimiser repeats them."""


class Kind(enum.Enum):
    """What a checkpoint is."""

    fsdp = "verl's FSDP shards"
    distributed = "a distributed checkpoint"
    megatron = "a Megatron grid"
    hugging_face = "a Hugging Face folder"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`Checkpoint(Kind.fsdp, Path("global_step_8/actor"), Path("global_step_8/actor/huggingface"))`."""

    kind: Kind
    folder: Path
    companions: Path
    """The folder of its config.json, tokenizer and chat template."""

    def expected(self) -> Expected:
        """What its config calls for."""
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


def find_checkpoint(place: Path, companions: Path | None) -> Checkpoint:
    """The checkpoint of a folder, or of the `actor` in it; `companions` is another folder for config and tokenizer."""
    if not place.is_dir():
        raise ConfigError(f"no such folder: {place}")
    try:
        found = _recognised(place) or (_recognised(place / ACTOR) if (place / ACTOR).is_dir() else None)
    except OSError as error:
        raise StorageError(f"{place} cannot be read: {error.strerror or error}") from error
    if found is None:
        steps = [path.name for pattern in STEPS for path in place.glob(pattern)]
        hint = f"; it has {listed(sorted(steps))}: name one, or --all" if steps else ""
        raise ConfigError(
            f"{place} holds no weights that are known here: neither model_world_size_W_rank_R.pt nor mp_rank_TT_PPP "
            f"nor {HEAD} nor model.safetensors{hint}"
        )
    kind, folder = found
    if companions is not None:
        if not (companions / "config.json").is_file():
            raise ConfigError(f"--hf {companions} has no config.json; it must be a Hugging Face model folder")
        return Checkpoint(kind, folder, companions)
    near = [folder, folder.parent, folder.parent.parent] if folder != place else [folder, folder.parent]
    places = [beside for around in near for beside in (around / "huggingface", around / POLICY, around)]
    beside = next((each for each in places if (each / "config.json").is_file()), None)
    if beside is None:
        raise ConfigError(f"{folder} has no folder `huggingface` with a config.json beside its weights: give --hf")
    return Checkpoint(kind, folder, beside)


def _recognised(place: Path) -> tuple[Kind, Path] | None:
    if is_fsdp(place):
        return Kind.fsdp, place
    grid = grid_folder(place)
    if grid is not None:
        return Kind.megatron, grid
    if _is_model(place / POLICY):  # a checkpoint of ours: the whole model, an adapter merged
        return Kind.hugging_face, place / POLICY
    for folder in (place, place / "dist_ckpt", place / "model" / "dist_ckpt", place / "model"):
        if is_distributed(folder):
            return Kind.distributed, folder
    models = (place, place / "huggingface", place / "model" / "huggingface")
    return next(((Kind.hugging_face, folder) for folder in models if _is_model(folder)), None)


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def read_weights(checkpoint: Checkpoint, expected: Expected) -> dict[str, Stored]:
    """The tensors under Hugging Face names, with LoRA factors among them where there are any; none is read yet."""
    match checkpoint.kind:
        case Kind.fsdp:
            return read_fsdp(checkpoint.folder, expected.in_memory())
        case Kind.megatron:
            return read_megatron(checkpoint.folder, refuse_other_families(expected.config, str(checkpoint.folder)))
        case Kind.hugging_face:
            return read_safetensors(checkpoint.folder)
    found = read_distributed(checkpoint.folder)
    if any(name.startswith("decoder.layers.") for name in found):
        config = refuse_other_families(expected.config, str(checkpoint.folder))
        return read_distributed_megatron(found, config, str(checkpoint.folder))
    return _named(found, expected, checkpoint.folder)


def _named(found: Mapping[str, Stored], expected: Expected, folder: Path) -> dict[str, Stored]:
    """The weights of a distributed checkpoint among all it holds: by Hugging Face names, or fused as in our decoder."""
    plain = {plain_name(name): stored for name, stored in found.items()}
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


def _unfused(found: Mapping[str, Stored], config: DecoderConfig, folder: Path) -> dict[str, Stored]:
    made: dict[str, Stored] = {}
    for part in layout(config):
        stored, start = found[part.name], 0
        if stored.shape != part.shape:
            raise StorageError(f"{folder}: {part.name} is {stored.shape}, config.json says {part.shape}")
        for name, rows in part.sources:
            end = start + rows
            made[name] = Stored(stored.dtype, (rows, *stored.shape[1:]), functools.partial(_rows, stored, start, end))
            start = end
    return made


def _rows(stored: Stored, start: int, end: int) -> Tensor:
    return stored.read()[start:end]


def steps_in(base: Path) -> list[Path]:
    """The folders of a run's checkpoints, by step."""
    found = {path for pattern in STEPS for path in base.glob(pattern) if path.is_dir()}
    numbered = [(int(path.name.rpartition("_")[2]), path) for path in found if path.name.rpartition("_")[2].isdecimal()]
    if not numbered:
        raise ConfigError(f"--all: {base} has no folders {' or '.join(STEPS)}")
    return [path for _, path in sorted(numbered)]
