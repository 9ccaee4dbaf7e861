"""From a checkpoint to a Hugging Face folder, LoRA factors folded in or set apart: one, or all steps of a run."""

import dataclasses
import enum
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from turnwise.engines.model.tensor_file import write_made
from turnwise.errors import ConfigError, EngineError, StorageError, TurnwiseError, one_line
from turnwise.ext.weights.expected_tensors import Expected, fitting
from turnwise.ext.weights.lazy_tensor import Stored, read_safetensors
from turnwise.ext.weights.model_folder import (
    MANIFEST,
    Advance,
    Form,
    appearing,
    carry,
    check_target,
    missing_of,
    one_format,
    write_manifest,
    write_weights,
)
from turnwise.ext.weights.names import PEFT, listed
from turnwise.ext.weights.sources import SourceCheckpoint, find_checkpoint, read_weights, steps_in
from turnwise.system.files import replacing

FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<kind>[AB])(?:\.(?P<adapter>[^.]+))?\.weight")
META = "lora_train_meta.json"
FOLDER = "lora_adapter"


@dataclass(frozen=True, slots=True)
class LoraFactors:
    """Factors [r, in] and [out, r] by module: `scale * B A` is added to its weight."""

    factors: dict[str, tuple[Stored, Stored]]
    rank: int
    alpha: float
    task: str = "CAUSAL_LM"


def set_apart(
    tensors: Mapping[str, Stored], folder: Path, alpha: float | None
) -> tuple[dict[str, Stored], LoraFactors | None]:
    """The model's own tensors, and the adapter where there is one. verl 0.6 does not say its alpha: `alpha` does."""
    halves: dict[str, dict[str, Stored]] = {}
    adapters: set[str] = set()
    base: dict[str, Stored] = {}
    for name, stored in tensors.items():
        match = FACTOR.fullmatch(name)
        if match is None:
            base[name] = stored
            continue
        halves.setdefault(match["module"], {})[match["kind"]] = stored
        adapters.add(match["adapter"] or "default")
    if not halves:
        if alpha is not None:
            raise ConfigError(f"--lora-alpha: {folder} holds no LoRA factors")
        return base, None
    if len(adapters) > 1:
        raise StorageError(f"{folder} holds several adapters ({listed(sorted(adapters))}); one can be merged")
    if lone := sorted(module for module, pair in halves.items() if len(pair) != 2):
        raise StorageError(f"{folder}: {lone[0]} has one of its two LoRA factors")
    meta = _meta(folder)
    ranks = {pair["A"].shape[0] for pair in halves.values()}
    for module, pair in halves.items():
        a, b = pair["A"].shape, pair["B"].shape
        if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
            raise StorageError(f"{folder}: the LoRA factors of {module} are {a} and {b}, which cannot be multiplied")
    if len(ranks) > 1 or meta.get("r", *ranks) not in ranks:
        raise StorageError(f"{folder}: the LoRA factors have the ranks {sorted(ranks)}, {META} says {meta.get('r')}")
    scale = meta.get("lora_alpha") if alpha is None else alpha
    if not isinstance(scale, int | float) or isinstance(scale, bool) or not scale > 0:
        raise ConfigError(
            f"{folder} holds LoRA factors of rank {min(ranks)} but no {META} with their alpha, which sets the "
            "scale of the update: give training's value with --lora-alpha"
        )
    factors = {module: (pair["A"], pair["B"]) for module, pair in halves.items()}
    return base, LoraFactors(factors, min(ranks), float(scale), str(meta.get("task_type") or "CAUSAL_LM"))


def _meta(folder: Path) -> dict[str, Any]:
    path = folder / META
    if not path.is_file():
        return {}
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StorageError(f"{path} cannot be read: {error}") from error
    if not isinstance(meta, dict):
        raise StorageError(f"{path} must hold a JSON object, found {type(meta).__name__}")
    return meta


def folded(base: Mapping[str, Stored], adapter: LoraFactors, where: str) -> dict[str, Stored]:
    """The model with the adapter added, computed in float32 and rounded once to the number format of the weight."""
    tensors = dict(base)
    for module, (a, b) in adapter.factors.items():
        weight = base.get(f"{module}.weight")
        if weight is None:
            raise EngineError(f"{where}: there is no {module}.weight for the LoRA factors of {module}")
        if weight.shape != (b.shape[0], a.shape[1]):
            raise EngineError(
                f"{where}: {module}.weight is {weight.shape}, its LoRA factors make {(b.shape[0], a.shape[1])}"
            )
        tensors[f"{module}.weight"] = Stored(
            weight.dtype, weight.shape, _Sum(weight, a, b, adapter.alpha / adapter.rank)
        )
    return tensors


@dataclass(frozen=True, slots=True)
class _Sum:
    weight: Stored
    a: Stored
    b: Stored
    scale: float

    def __call__(self) -> Tensor:
        added = self.b.read().float() @ self.a.read().float()
        return added.mul_(self.scale).add_(self.weight.read()).to(self.weight.dtype)


def write_adapter(folder: Path, adapter: LoraFactors, base_model: str) -> None:
    """The factors as peft loads them onto `base_model`."""
    theirs = {
        f"{PEFT}{module}.lora_{kind}.weight": factor
        for module, pair in adapter.factors.items()
        for kind, factor in zip("AB", pair, strict=True)
    }
    formats = {name: (stored.dtype, stored.shape) for name, stored in theirs.items()}
    write_made(folder / "adapter_model.safetensors", formats, lambda name: theirs[name].read(), {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": adapter.task,
        "base_model_name_or_path": base_model,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted(adapter.factors),
    }
    with replacing(folder / "adapter_config.json") as file:
        file.write((json.dumps(config, indent=2) + "\n").encode())


@dataclass(frozen=True, slots=True)
class Merge:
    """How checkpoints are merged: `Merge(Form(torch.bfloat16))`."""

    form: Form
    companions: Path | None = None
    base: Path | None = None
    """The model below an adapter that was saved alone."""
    alpha: float | None = None
    keep_adapter: bool = False
    force: bool = False


@dataclass(frozen=True, slots=True)
class MergePlan:
    """A merge whose tensors were found and held against the config; nothing is written."""

    checkpoint: SourceCheckpoint
    expected: Expected
    tensors: dict[str, Stored]
    """Empty where an adapter was saved alone and is kept apart."""
    adapter: LoraFactors | None
    made_of: dict[str, Any]

    def bytes(self, form: Form) -> int:
        """The bytes that the merge writes when tensors are stored in this form."""
        return sum(stored.bytes // stored.dtype.itemsize * form.of(stored).itemsize for stored in self.tensors.values())


def plan_merge(checkpoint: SourceCheckpoint, merge: Merge) -> MergePlan:
    """Find every tensor of a checkpoint, and refuse what is not the model of its config."""
    expected = checkpoint.expected()
    where = str(checkpoint.folder)
    own, adapter = set_apart(read_weights(checkpoint, expected), checkpoint.folder, merge.alpha)
    if adapter is None and merge.keep_adapter:
        raise ConfigError(f"--keep-adapter: {checkpoint.folder} holds no LoRA factors")
    alone = adapter is not None and not own
    if merge.base is not None:
        if not alone:
            raise ConfigError(f"--base {merge.base}: {checkpoint.folder} holds the model itself")
        own = read_safetensors(merge.base)
    elif alone and not merge.keep_adapter:
        raise ConfigError(
            f"{checkpoint.folder} holds LoRA factors alone: give the model they were trained on with --base, or "
            "--keep-adapter to write them by themselves"
        )
    if adapter is not None and own and not merge.keep_adapter:
        tensors = fitting(folded(own, adapter, where), expected, where)
    else:
        if adapter is not None and own:
            folded(own, adapter, where)  # every factor must have its matrix
        tensors = fitting(own, expected, where) if own else {}
    return MergePlan(
        checkpoint, expected, tensors, None if not merge.keep_adapter else adapter, _made_of(checkpoint, merge)
    )


def _made_of(checkpoint: SourceCheckpoint, merge: Merge) -> dict[str, Any]:
    options = {
        "dtype": str(merge.form.dtype), "largest": merge.form.largest, "alpha": merge.alpha,
        "base": merge.base and merge.base.name, "keep_adapter": merge.keep_adapter,
    }  # fmt: skip
    return {"kind": checkpoint.kind.name, "options": options, "files": checkpoint.files()}


def write_merge(
    plan: MergePlan, target: Path, merge: Merge, advance: Advance, check: Callable[[Path], None] = lambda folder: None
) -> None:
    """The folder appears whole and checked or not at all."""
    sources = [plan.checkpoint.folder, plan.checkpoint.companions, *([merge.base] if merge.base else [])]
    with appearing(target, merge.force, *sources) as folder:
        if plan.tensors:
            carry(plan.checkpoint.companions, folder, one_format(plan.tensors, merge.form))
            write_weights(folder, plan.tensors, merge.form, str(plan.checkpoint.folder), advance)
        if plan.adapter is not None:
            beside = folder / FOLDER if plan.tensors else folder
            write_adapter(beside, plan.adapter, str(target.resolve() if plan.tensors else merge.base or ""))
        write_manifest(folder, plan.made_of)
        check(folder)


class MergeResult(enum.StrEnum):
    """What became of a step of the merge: merged, skipped or failed."""

    merged = "merged"
    skipped = "skipped"
    """Its folder is there and whole."""
    failed = "failed"


@dataclass(frozen=True, slots=True)
class MergeOutcome:
    """`MergeOutcome("global_step_8", MergeResult.failed, "... lacks model_world_size_2_rank_1.pt")`."""

    step: str
    result: MergeResult
    reason: str = ""


def merge_all(
    base: Path,
    target: Path,
    merge: Merge,
    begin: Callable[[str, MergePlan], Advance],
    say: Callable[[MergeOutcome], None],
) -> list[MergeOutcome]:
    """Every step of a run into a folder of its name; one that is whole is skipped, one that fails is passed over."""
    outcomes: list[MergeOutcome] = []
    for step in steps_in(base):
        try:
            outcome = _merge_step(step, target / step.name, merge, begin)
        except TurnwiseError as error:
            outcome = MergeOutcome(step.name, MergeResult.failed, one_line(error))
        outcomes.append(outcome)
        say(outcome)
    return outcomes


def _merge_step(step: Path, target: Path, merge: Merge, begin: Callable[[str, MergePlan], Advance]) -> MergeOutcome:
    checkpoint = find_checkpoint(step, merge.companions)
    again = ""
    if target.is_dir() and any(target.iterdir()) and not merge.force:
        problem = missing_of(target, _made_of(checkpoint, merge))
        if problem is None:
            return MergeOutcome(step.name, MergeResult.skipped, "done already")
        if not (target / MANIFEST).is_file():
            raise ConfigError(f"{target} exists and {problem}: it is from elsewhere or incomplete; --force replaces it")
        again = f"again: {problem}"
        merge = dataclasses.replace(merge, force=True)
    check_target(target, merge.force, checkpoint.folder, checkpoint.companions)
    plan = plan_merge(checkpoint, merge)
    write_merge(plan, target, merge, begin(step.name, plan))
    return MergeOutcome(step.name, MergeResult.merged, again)
