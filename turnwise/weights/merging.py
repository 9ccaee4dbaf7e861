"""From a checkpoint to a Hugging Face folder: one of them, or all steps of a run."""

import dataclasses
import enum
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.errors import ConfigError, TurnwiseError, one_line
from turnwise.weights.adapters import FOLDER, Adapter, folded, set_apart, write_adapter
from turnwise.weights.expected import Expected, fitting
from turnwise.weights.model_folder import (
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
from turnwise.weights.sources import Checkpoint, find_checkpoint, read_weights, steps_in
from turnwise.weights.stored import Stored, read_safetensors


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
class Plan:
    """A merge whose tensors were found and held against the config; nothing is written."""

    checkpoint: Checkpoint
    expected: Expected
    tensors: dict[str, Stored]
    """Empty where an adapter was saved alone and is kept apart."""
    adapter: Adapter | None
    made_of: dict[str, Any]

    def bytes(self, form: Form) -> int:
        """To be written."""
        return sum(stored.bytes // stored.dtype.itemsize * form.of(stored).itemsize for stored in self.tensors.values())


def plan_merge(checkpoint: Checkpoint, merge: Merge) -> Plan:
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
    return Plan(checkpoint, expected, tensors, None if not merge.keep_adapter else adapter, _made_of(checkpoint, merge))


def _made_of(checkpoint: Checkpoint, merge: Merge) -> dict[str, Any]:
    options = {
        "dtype": str(merge.form.dtype), "largest": merge.form.largest, "alpha": merge.alpha,
        "base": merge.base and merge.base.name, "keep_adapter": merge.keep_adapter,
    }  # fmt: skip
    return {"kind": checkpoint.kind.name, "options": options, "files": checkpoint.files()}


def write_merge(
    plan: Plan, target: Path, merge: Merge, advance: Advance, check: Callable[[Path], None] = lambda folder: None
) -> None:
    """The folder appears whole and checked or not at all."""
    kept = [plan.checkpoint.folder, plan.checkpoint.companions, *([merge.base] if merge.base else [])]
    with appearing(target, merge.force, *kept) as folder:
        if plan.tensors:
            carry(plan.checkpoint.companions, folder, one_format(plan.tensors, merge.form))
            write_weights(folder, plan.tensors, merge.form, str(plan.checkpoint.folder), advance)
        if plan.adapter is not None:
            beside = folder / FOLDER if plan.tensors else folder
            write_adapter(beside, plan.adapter, str(target.resolve() if plan.tensors else merge.base or ""))
        write_manifest(folder, plan.made_of)
        check(folder)


class Result(enum.StrEnum):
    """What became of a step."""

    merged = "merged"
    skipped = "skipped"
    """Its folder is there and whole."""
    failed = "failed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """`Outcome("global_step_8", Result.failed, "... lacks model_world_size_2_rank_1.pt")`."""

    step: str
    result: Result
    reason: str = ""


def merge_all(
    base: Path,
    target: Path,
    merge: Merge,
    begin: Callable[[str, Plan], Advance],
    say: Callable[[Outcome], None],
) -> list[Outcome]:
    """Every step of a run into a folder of its name; one that is whole is skipped, one that fails is passed over."""
    outcomes: list[Outcome] = []
    for step in steps_in(base):
        try:
            outcome = _merge_step(step, target / step.name, merge, begin)
        except TurnwiseError as error:
            outcome = Outcome(step.name, Result.failed, one_line(error))
        outcomes.append(outcome)
        say(outcome)
    return outcomes


def _merge_step(step: Path, target: Path, merge: Merge, begin: Callable[[str, Plan], Advance]) -> Outcome:
    checkpoint = find_checkpoint(step, merge.companions)
    again = ""
    if target.is_dir() and any(target.iterdir()) and not merge.force:
        problem = missing_of(target, _made_of(checkpoint, merge))
        if problem is None:
            return Outcome(step.name, Result.skipped, "done already")
        if not (target / MANIFEST).is_file():
            raise ConfigError(f"{target} exists and {problem}: it is another's, or half copied; --force replaces it")
        again = f"again: {problem}"
        merge = dataclasses.replace(merge, force=True)
    check_target(target, merge.force, checkpoint.folder, checkpoint.companions)
    plan = plan_merge(checkpoint, merge)
    write_merge(plan, target, merge, begin(step.name, plan))
    return Outcome(step.name, Result.merged, again)
