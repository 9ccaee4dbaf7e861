"""LoRA factors among trained weights: folded into the matrices they belong to, or set apart in peft's format."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from turnwise.engines.model.tensor_file import write_made
from turnwise.errors import ConfigError, EngineError, StorageError
from turnwise.files import replacing
from turnwise.weights.names import PEFT, listed
from turnwise.weights.stored import Stored

FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<kind>[AB])(?:\.(?P<adapter>[^.]+))?\.weight")
META = "lora_train_meta.json"
FOLDER = "lora_adapter"


@dataclass(frozen=True, slots=True)
class Adapter:
    """Factors [r, in] and [out, r] by module: `scale * B A` is added to its weight."""

    factors: dict[str, tuple[Stored, Stored]]
    rank: int
    alpha: float
    task: str = "CAUSAL_LM"


def set_apart(
    found: Mapping[str, Stored], folder: Path, alpha: float | None
) -> tuple[dict[str, Stored], Adapter | None]:
    """The model's own tensors, and the adapter where there is one. verl 0.6 does not say its alpha: `alpha` does."""
    halves: dict[str, dict[str, Stored]] = {}
    adapters: set[str] = set()
    base: dict[str, Stored] = {}
    for name, stored in found.items():
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
            f"{folder} holds LoRA factors of rank {min(ranks)} and no {META} with their alpha, without which nobody "
            "knows how much to add: give --lora-alpha, as training had it"
        )
    factors = {module: (pair["A"], pair["B"]) for module, pair in halves.items()}
    return base, Adapter(factors, min(ranks), float(scale), str(meta.get("task_type") or "CAUSAL_LM"))


def _meta(folder: Path) -> dict[str, Any]:
    path = folder / META
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StorageError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise StorageError(f"{path} must hold a JSON object, found {type(found).__name__}")
    return found


def folded(base: Mapping[str, Stored], adapter: Adapter, where: str) -> dict[str, Stored]:
    """The model with the adapter added, computed in float32 and rounded once to the number format of the weight."""
    made = dict(base)
    for module, (a, b) in adapter.factors.items():
        weight = base.get(f"{module}.weight")
        if weight is None:
            raise EngineError(f"{where}: there is no {module}.weight for the LoRA factors of {module}")
        if weight.shape != (b.shape[0], a.shape[1]):
            raise EngineError(
                f"{where}: {module}.weight is {weight.shape}, its LoRA factors make {(b.shape[0], a.shape[1])}"
            )
        made[f"{module}.weight"] = Stored(weight.dtype, weight.shape, _Sum(weight, a, b, adapter.alpha / adapter.rank))
    return made


@dataclass(frozen=True, slots=True)
class _Sum:
    weight: Stored
    a: Stored
    b: Stored
    scale: float

    def __call__(self) -> Tensor:
        added = self.b.read().float() @ self.a.read().float()
        return added.mul_(self.scale).add_(self.weight.read()).to(self.weight.dtype)


def write_adapter(folder: Path, adapter: Adapter, base_model: str) -> None:
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
