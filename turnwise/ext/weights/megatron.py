"""Grids of Megatron-core checkpoints (`mp_rank_TT_PPP`): read as one Hugging Face model, and written from one."""

import re
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turnwise.errors import StorageError
from turnwise.ext.weights.expected_tensors import check_numbers, repeated
from turnwise.ext.weights.fused_tensors import apart, together
from turnwise.ext.weights.lazy_tensor import Stored
from turnwise.ext.weights.megatron_layout import (
    LAYER,
    MegatronModel,
    ParallelGrid,
    TensorSlot,
    joined,
    part_of,
    share,
)
from turnwise.ext.weights.megatron_names import ALSO, HEAD, OUTPUT, Cut
from turnwise.ext.weights.names import listed
from turnwise.ext.weights.pickles import read_pickle

RANK = re.compile(r"mp_rank_(\d\d)(?:_(\d\d\d))?")
FILES = ("model.pt", "model_optim_rng.pt", "model_rng.pt")
"""verl's, and Megatron-LM's with and without a distributed optimiser."""
LATEST = "latest_checkpointed_iteration.txt"
LOCAL_EXPERT = re.compile(r"\.mlp\.experts\.(?:local_experts|experts)\.(\d+)\.(linear_fc[12]\.weight)")
"""An expert of a layer that keeps them one by one; grouped, its number comes last."""
VERSION = 3.0
"""Megatron's, of checkpoints whose queries, keys and values lie group by group."""
Part = dict[str, Stored]
"""A stage's turn on one rank: tensors by Megatron's names."""


def iteration_folder(folder: Path) -> Path | None:
    """The newest iteration, where Megatron-LM says which that is."""
    if not (folder / LATEST).is_file():
        return None
    iteration = (folder / LATEST).read_text(encoding="utf-8", errors="replace").strip()
    if iteration != "release" and not iteration.isdecimal():
        raise StorageError(f"{folder / LATEST} says {iteration[:50]!r}, which is not an iteration")
    return folder / ("release" if iteration == "release" else f"iter_{int(iteration):07d}")


def grid_folder(folder: Path) -> Path | None:
    """Where the ranks of a grid lie: here, in `model` (verl), or in the newest iteration (Megatron-LM)."""
    newest = iteration_folder(folder)
    places = [*([newest] if newest else []), folder, folder / "model"]
    return next((candidate for candidate in places if candidate.is_dir() and any(candidate.glob("mp_rank_*"))), None)


def read_parts(folder: Path) -> tuple[ParallelGrid, dict[tuple[int, int, int], Part]]:
    """The grid, and its parts by (turn, stage, tensor rank); ranks that are missing are named."""
    ranks: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.glob("mp_rank_*")):
        match = RANK.fullmatch(path.name)
        if match is None:
            raise StorageError(f"{path} is not a rank of a tensor and pipeline grid; expert parallelism is not read")
        ranks[int(match[2] or 0), int(match[1])] = path
    grid = ParallelGrid(1 + max(rank for _, rank in ranks), 1 + max(stage for stage, _ in ranks))
    names = [(stage, rank) for stage in range(grid.pipeline) for rank in range(grid.tensor)]
    if missing := [rank_name(rank, stage, grid) for stage, rank in names if (stage, rank) not in ranks]:
        raise StorageError(f"{folder} lacks {listed(missing)} of its grid of {grid.tensor} x {grid.pipeline}")
    held = {key: _turns(_file(ranks[key])) for key in names}
    counts = {len(turns) for turns in held.values()}
    if len(counts) > 1:
        raise StorageError(f"{folder}: the ranks have {' and '.join(map(str, sorted(counts)))} turns, not one number")
    grid = ParallelGrid(grid.tensor, grid.pipeline, counts.pop())
    parts = {
        (turn, stage, rank): held[stage, rank][turn]
        for turn in range(grid.virtual)
        for stage, rank in names
    }  # fmt: skip
    for (turn, stage, rank), part in parts.items():
        if odd := sorted(part.keys() ^ parts[turn, stage, 0].keys()):
            raise StorageError(
                f"{rank_name(rank, stage, grid)} and {rank_name(0, stage, grid)} differ in {listed(odd)}"
            )
    return grid, parts


def rank_name(rank: int, stage: int, grid: ParallelGrid) -> str:
    """As Megatron names the folder of a rank."""
    return f"mp_rank_{rank:02d}" if grid.pipeline == 1 else f"mp_rank_{rank:02d}_{stage:03d}"


def _file(rank_folder: Path) -> Path:
    files = [rank_folder / name for name in FILES if (rank_folder / name).is_file()]
    if not files:
        raise StorageError(f"{rank_folder} lacks {' or '.join(FILES)}")
    if len(files) > 1:
        raise StorageError(f"{rank_folder} holds {files[0].name} and {files[1].name}; move one of them away")
    return files[0]


def _turns(path: Path) -> list[Part]:
    """The turns of a rank: a list of them, tables `model` or `model0`, `model1`, or one table of tensors."""
    content = read_pickle(path)
    if isinstance(content, list):
        tables: list[Any] = content
    elif isinstance(content, dict) and "model" in content:
        tables = [content["model"]]
    elif isinstance(content, dict) and "model0" in content:
        numbers = [number for number in range(len(content)) if f"model{number}" in content]
        tables = [content[f"model{number}"] for number in numbers]
        if numbers != list(range(len(numbers))):
            raise StorageError(f"{path} holds the turns {numbers}, some are missing")
    else:
        tables = [content]
    return [_part(table, path) for table in tables]


def _part(table: Any, path: Path) -> Part:
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table):
        raise StorageError(f"{path} holds no table of tensors by name")
    part: Part = {}
    for name, value in table.items():
        if name.endswith("_extra_state"):
            continue  # Transformer Engine's own, of eight-bit training
        name = usual_name(name.removeprefix("module."), table)
        if not isinstance(value, Tensor):
            raise StorageError(f"{path}: {name} is not a tensor")
        if name in part:
            raise StorageError(f"{path}: {name} stands there twice")
        part[name] = Stored.of(value)
    return part


def usual_name(name: str, names: Container[str]) -> str:
    """A tensor's name as layers of Transformer Engine have it, where `names` are those of the whole part."""
    sparse = name.endswith(".pre_mlp_layernorm.weight") and (
        name.replace("pre_mlp_layernorm", "mlp.router") in names
    )  # a layer of experts calls it that everywhere
    if not sparse:
        for other, usual in ALSO.items():
            name = name.removesuffix(other) + usual if name.endswith(f".{other}") else name
    return LOCAL_EXPERT.sub(r".mlp.experts.\2\1", name)


def read_megatron(folder: Path, model: MegatronModel) -> dict[str, Stored]:
    """The Hugging Face tensors of a grid; layers are counted through the parts, which may be of any sizes."""
    grid, parts = read_parts(folder)
    tensors: dict[str, Stored] = {}
    first, chunks = 0, list(grid.chunks())
    for number, (turn, stage) in enumerate(chunks):
        ranks = [parts[turn, stage, rank] for rank in range(grid.tensor)]
        where = f"{folder.name}/{rank_name(0, stage, grid)}, turn {turn}"
        begins, ends = number == 0, number == len(chunks) - 1
        part, layers = joined_part(ranks, model, first, where, begins=begins, ends=ends)
        tensors |= part
        first += layers
    if first != model.layers:
        raise StorageError(f"{folder} holds {first} layers, config.json says {model.layers}")
    if model.tied and HEAD in tensors:  # the last stage's copy of the embedding
        tied, embedding = tensors.pop(HEAD), model.embedding
        tensors[embedding] = repeated(tied, tensors[embedding], HEAD, embedding, str(folder))
    return together(tensors, model.expected.shapes)


def joined_part(
    ranks: list[Part], model: MegatronModel, first: int, where: str, *, begins: bool, ends: bool
) -> tuple[dict[str, Stored], int]:
    """The Hugging Face tensors of a part, and how many layers it has; all must be there, and no other."""
    held = ranks[0]
    layers = count_layers(held, model, where)
    slots = {slot.name: slot for slot in model.part(first, layers, begins=begins, ends=ends)}
    output = model.prefix + OUTPUT
    may_be = {output} if model.tied and ends else set()
    if missing := sorted(slots.keys() - held.keys() - may_be):
        raise StorageError(f"{where} lacks {listed(missing)}")
    if surplus := sorted(held.keys() - slots.keys() - may_be):
        raise StorageError(f"{where} holds {listed(surplus)}, which this model has no place for")
    tensors: dict[str, Stored] = {}
    for name in held:
        slot = TensorSlot(output, Cut.words, (HEAD,)) if name == output else slots[name]
        tensors |= joined(slot, [rank[name] for rank in ranks], model)
    return tensors, layers


def count_layers(part: Mapping[str, Stored], model: MegatronModel, where: str) -> int:
    """How many of the decoder's layers a part has."""
    start = model.prefix + LAYER
    numbers = {name.removeprefix(start).partition(".")[0] for name in part if name.startswith(start)}
    if numbers != {str(index) for index in range(len(numbers))}:
        raise StorageError(f"{where}: its layers are {listed(sorted(numbers))}, not numbered from 0")
    return len(numbers)


def write_megatron(
    folder: Path,
    tensors: Mapping[str, Stored],
    model: MegatronModel,
    grid: ParallelGrid,
    *,
    dtype: torch.dtype | None,
    multiple: int,
    advance: Callable[[int], None],
) -> None:
    """`release/mp_rank_TT_PPP/model_optim_rng.pt` as Megatron-LM loads them; one rank is in memory at a time."""
    chunks, plain = list(grid.chunks()), apart(tensors)
    for stage in range(grid.pipeline):
        for rank in range(grid.tensor):
            turns: list[dict[str, Tensor]] = []
            for number, (turn, at) in enumerate(chunks):
                if at != stage:
                    continue
                first, layers = part_of(model, grid, turn, stage)
                slots = model.part(first, layers, begins=number == 0, ends=number == len(chunks) - 1)
                part: dict[str, Tensor] = {}
                for slot in slots:
                    own = share(slot, plain, rank, grid.tensor, multiple)
                    part[slot.name] = own if dtype is None else own.to(dtype)
                    check_numbers(slot.name, part[slot.name], own.dtype, "the grid")
                    advance(part[slot.name].nbytes)
                turns.append(part)
            rank_folder = folder / "release" / rank_name(rank, stage, grid)
            rank_folder.mkdir(parents=True)
            names = ["model"] if grid.virtual == 1 else [f"model{turn}" for turn in range(grid.virtual)]
            state = dict(zip(names, turns, strict=True))
            torch.save({"checkpoint_version": VERSION, "iteration": 0, **state}, rank_folder / FILES[1])
    (folder / LATEST).write_text("release\n", encoding="utf-8")
