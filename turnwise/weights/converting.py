"""A Hugging Face folder to a Megatron grid and back, each held against the other where that is asked for."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from turnwise.errors import ConfigError
from turnwise.weights.distributed import read_distributed
from turnwise.weights.expected import fitting
from turnwise.weights.megatron import distributed_part, read_parts, write_megatron
from turnwise.weights.megatron_layout import Grid, check_grid, refuse_other_families
from turnwise.weights.merging import Merge, Plan, write_merge
from turnwise.weights.model_folder import Advance, Form, appearing, carry, one_format, write_manifest
from turnwise.weights.sources import Checkpoint, Kind
from turnwise.weights.stored import read_safetensors
from turnwise.weights.verifying import Parts, Proof, verify

COMPANIONS = "huggingface"


@dataclass(frozen=True, slots=True)
class ToMegatron:
    """How a grid is made: `ToMegatron(Grid(tensor=2), torch.bfloat16)`."""

    grid: Grid
    dtype: torch.dtype | None = None
    multiple: int = 128
    """A rank's share of the vocabulary is padded to a multiple of this, as Megatron does by default."""
    verify: bool = False
    force: bool = False


def to_megatron(source: Path, target: Path, how: ToMegatron, begin: Callable[[int], Advance]) -> Proof | None:
    """Write the grid, config and tokenizer in `huggingface` beside it; it appears whole and checked or not at all."""
    checkpoint = Checkpoint(Kind.hugging_face, source, source)
    expected = checkpoint.expected()
    config = refuse_other_families(expected.config, str(source))
    check_grid(how.grid, config)
    tensors = fitting(read_safetensors(source), expected, str(source))
    form = Form(how.dtype)
    width = sum(stored.bytes // stored.dtype.itemsize * form.of(stored).itemsize for stored in tensors.values())
    advance = begin(width)
    with appearing(target, how.force, source) as folder:
        write_megatron(folder, tensors, config, how.grid, dtype=how.dtype, multiple=how.multiple, advance=advance)
        (folder / COMPANIONS).mkdir()
        carry(source, folder / COMPANIONS, one_format(tensors, form))
        write_manifest(folder, {"kind": checkpoint.kind.name, "files": checkpoint.files()})
        if not how.verify:
            return None
        grid, parts = read_parts(folder / "release")
        return verify(grid, parts, tensors, config, how.dtype)


def from_megatron(plan: Plan, target: Path, merge: Merge, advance: Advance, *, check: bool) -> Proof | None:
    """Write the Hugging Face folder of a grid, and hold it against the grid before it gets its name."""
    if not check:
        write_merge(plan, target, merge, advance)
        return None
    proofs: list[Proof] = []

    def prove(folder: Path) -> None:
        config = refuse_other_families(plan.expected.config, str(plan.checkpoint.folder))
        grid, parts = parts_of(plan.checkpoint)
        proofs.append(verify(grid, parts, read_safetensors(folder), config, merge.form.dtype))

    write_merge(plan, target, merge, advance, prove)
    return proofs[0]


def parts_of(checkpoint: Checkpoint) -> tuple[Grid, Parts]:
    """The parts of a grid, or of Megatron's distributed format as a grid of one."""
    if checkpoint.kind is Kind.megatron:
        return read_parts(checkpoint.folder)
    config = refuse_other_families(checkpoint.expected().config, str(checkpoint.folder))
    part = distributed_part(read_distributed(checkpoint.folder), config, str(checkpoint.folder))
    return Grid(), {(0, 0, 0): part}


def refuse_other_sources(checkpoint: Checkpoint) -> None:
    """`from-mcore` takes Megatron's formats, and says what else a folder is."""
    is_theirs = checkpoint.kind is Kind.megatron or (
        checkpoint.kind is Kind.distributed
        and any(name.startswith("decoder.layers.") for name in read_distributed(checkpoint.folder))
    )
    if not is_theirs:
        raise ConfigError(
            f"{checkpoint.folder} is {checkpoint.kind.value}, not Megatron's: use `turnwise weights merge`"
        )
