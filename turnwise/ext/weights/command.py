"""`turnwise weights ACTION SOURCE TARGET`: trained weights to a Hugging Face folder, or one to Megatron and back."""

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise.errors import ConfigError

if TYPE_CHECKING:
    from turnwise.ext.weights.merging import Merge, MergeOutcome, MergePlan

GROUP = "after a run"
HELP = "merge trained weights into a Hugging Face folder, or convert one to Megatron and back"
MERGE, TO, FROM = "merge", "to-mcore", "from-mcore"
FORMATS = ("grid", "distributed")
SPLITS = ("tp", "pp", "vpp")
DTYPES = ("float32", "bfloat16", "float16")
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
ONLY = {
    "all": (MERGE,), "base": (MERGE,), "lora_alpha": (MERGE,), "keep_adapter": (MERGE,),
    "hf": (MERGE, FROM), "max_file_size": (MERGE, FROM), "verify": (TO, FROM),
    "tp": (TO,), "format": (TO,), "pp": (TO,), "vpp": (TO,), "vocab_multiple": (TO,),
}  # fmt: skip
"""Options that some of the actions read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=[MERGE, TO, FROM], help="to Hugging Face; to Megatron; from it")
    parser.add_argument("source", type=Path, metavar="SOURCE", help="the folder of a checkpoint (docs/ext/weights.md)")
    parser.add_argument(
        "target", type=Path, metavar="TARGET", help="the folder to write; it appears whole or not at all"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="number format to write (default: as stored)")
    parser.add_argument("--force", action="store_true", help="replace an existing TARGET")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    folders = parser.add_argument_group("merge and from-mcore")
    folders.add_argument(
        "--hf", type=Path, metavar="FOLDER", help="config and tokenizer, if they are not beside the weights"
    )
    folders.add_argument("--max-file-size", metavar="SIZE", help="largest size of one safetensors file (default 5GB)")
    merge = parser.add_argument_group("merge")
    merge.add_argument("--all", action="store_true", default=None, help="every global_step_* (or step_*) of SOURCE")
    merge.add_argument("--base", type=Path, metavar="FOLDER", help="base model of LoRA factors that were saved alone")
    merge.add_argument("--lora-alpha", type=float, metavar="ALPHA", help="LoRA's alpha, where the checkpoint lacks it")
    merge.add_argument(
        "--keep-adapter", action="store_true", default=None, help="write LoRA factors apart, as peft does"
    )
    grid = parser.add_argument_group(
        "to-mcore",
        "Families: llama, mistral, qwen2, qwen3, qwen3_moe, qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe. "
        "`grid` has a file of each rank (--ckpt-format torch); `distributed` has whole tensors (torch_dist), "
        "which ranks of any tensor, pipeline and expert split load.",
    )
    grid.add_argument("--format", choices=FORMATS, help="Megatron's format (default grid)")
    grid.add_argument("--tp", type=int, metavar="N", help="tensor-parallel ranks (default 1)")
    grid.add_argument("--pp", type=int, metavar="N", help="pipeline stages (default 1)")
    grid.add_argument("--vpp", type=int, metavar="N", help="virtual stages of each pipeline stage (default 1)")
    grid.add_argument(
        "--vocab-multiple", type=int, metavar="N", help="rows a rank's vocabulary is padded to (default 128)"
    )
    proof = parser.add_argument_group("to-mcore and from-mcore")
    proof.add_argument(
        "--verify",
        action="store_true",
        default=None,
        help="convert back and compare bit by bit; compare logits",
    )


def run(args: argparse.Namespace) -> int:
    """0 when everything was written, 1 when a step of --all failed."""
    for option, actions in ONLY.items():
        if getattr(args, option) is not None and args.action not in actions:
            raise ConfigError(f"--{option.replace('_', '-')} is for {' and '.join(actions)}, not for {args.action}")
    for option in (*SPLITS, "vocab_multiple"):
        if getattr(args, option) is not None and getattr(args, option) < 1:
            raise ConfigError(f"--{option.replace('_', '-')} {getattr(args, option)}: at least 1")
    if args.action == TO:
        return _to_megatron(args)
    if args.all:
        return _merge_all(args)
    return _merge_one(args)


def _merge_one(args: argparse.Namespace) -> int:
    from turnwise.ext.weights.converting import from_megatron, refuse_other_sources
    from turnwise.ext.weights.merging import plan_merge
    from turnwise.ext.weights.model_folder import check_target
    from turnwise.ext.weights.sources import find_checkpoint

    merge = _options(args)
    checkpoint = find_checkpoint(args.source, args.hf)
    if args.action == FROM:
        refuse_other_sources(checkpoint)
    check_target(args.target, args.force, checkpoint.folder, checkpoint.companions)
    plan = plan_merge(checkpoint, merge)
    with _bar() as bar:
        advance = bar(args.target.name, plan.bytes(merge.form))
        proof = from_megatron(plan, args.target, merge, advance, check=bool(args.verify))
    _say(f"wrote {args.target}: {len(plan.tensors)} tensors from {checkpoint.kind.value}")
    if proof is not None:
        _say(str(proof))
    _result(args, {"tensors": len(plan.tensors), "bytes": plan.bytes(merge.form), "kind": checkpoint.kind.name})
    return 0


def _merge_all(args: argparse.Namespace) -> int:
    from turnwise.ext.weights.merging import MergeResult, merge_all

    merge = _options(args)

    def tell(outcome: "MergeOutcome") -> None:
        _say(f"{outcome.step}: {outcome.result}{f' ({outcome.reason})' if outcome.reason else ''}")

    with _bar() as bar:

        def begin(step: str, plan: "MergePlan") -> Callable[[int], None]:
            return bar(step, plan.bytes(merge.form))

        outcomes = merge_all(args.source, args.target, merge, begin, tell)
    counts = {kind.value: sum(outcome.result is kind for outcome in outcomes) for kind in MergeResult}
    _say(", ".join(f"{number} {kind}" for kind, number in counts.items()))
    _result(args, counts)
    return 1 if counts["failed"] else 0


def _to_megatron(args: argparse.Namespace) -> int:
    import torch

    from turnwise.ext.weights.converting import MegatronFormat, ToMegatron, to_megatron
    from turnwise.ext.weights.megatron_layout import ParallelGrid

    layout = MegatronFormat(args.format or FORMATS[0])
    given = [option for option in SPLITS if getattr(args, option) is not None]
    if layout is MegatronFormat.distributed and given:
        raise ConfigError(
            f"--{given[0]}: the distributed format knows of no split; Megatron makes its own when it loads"
        )
    grid = ParallelGrid(args.tp or 1, args.pp or 1, args.vpp or 1)
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    how = ToMegatron(grid, dtype, args.vocab_multiple or 128, bool(args.verify), args.force, layout)
    with _bar() as bar:
        proof = to_megatron(args.source, args.target, how, lambda size: bar(args.target.name, size))
    shape = f"a grid of {grid.tensor} x {grid.pipeline} x {grid.virtual}"
    _say(f"wrote {args.target}: {shape if layout is MegatronFormat.grid else 'a distributed checkpoint'}")
    if proof is not None:
        _say(str(proof))
    _result(args, {"tp": grid.tensor, "pp": grid.pipeline, "vpp": grid.virtual})
    return 0


def _options(args: argparse.Namespace) -> "Merge":
    import torch

    from turnwise.ext.weights.merging import Merge
    from turnwise.ext.weights.model_folder import Form

    if args.lora_alpha is not None and not 0 < args.lora_alpha < float("inf"):
        raise ConfigError(f"--lora-alpha {args.lora_alpha}: a positive number")
    form = Form(None if args.dtype is None else getattr(torch, args.dtype), _bytes(args.max_file_size or "5GB"))
    return Merge(form, args.hf, args.base, args.lora_alpha, bool(args.keep_adapter), args.force)


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMG]?B?)", text, re.IGNORECASE)
    unit = match[2].upper() if match else "?"
    unit = unit if unit in UNITS else f"{unit}B"
    size = int(float(match[1]) * UNITS[unit]) if match and unit in UNITS else 0
    if size < 1:
        raise ConfigError(f"--max-file-size {text}: a size such as 5GB or 500MB")
    return size


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """Bytes written, on a terminal; elsewhere nothing is drawn."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:

        def start(name: str, total: int) -> Callable[[int], None]:
            task = progress.add_task(name, total=total)
            return lambda size: progress.advance(task, size)

        yield start


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _result(args: argparse.Namespace, facts: dict[str, Any]) -> None:
    if args.json:
        _say(json.dumps({"target": str(args.target), **facts}))
