"""The tensors that a model's config.json calls for, to hold what was found against before anything is written."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from turnwise.engines.model.config_fields import MOST_LAYERS, NotNative
from turnwise.engines.model.huggingface_folder import (
    ARCHITECTURES,
    DecoderConfig,
    config_from_hf,
    layout,
    read_raw_config,
)
from turnwise.errors import EngineError, one_line
from turnwise.ext.weights.lazy_tensor import Stored, same_bits
from turnwise.ext.weights.names import listed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ROTARY = "rotary_emb.inv_freq"
"""How the names of tables end that old folders stored; every model makes its own."""


@dataclass(frozen=True, slots=True)
class Expected:
    """`Expected("runs/x/huggingface", {"model.norm.weight": (128,), ...})`: names and shapes as files hold them."""

    where: str
    shapes: dict[str, tuple[int, ...]]
    tied: dict[str, str] = field(default_factory=dict)
    """Names that may come too, each with the one whose numbers it must repeat."""
    config: DecoderConfig | None = None
    """Where the model is one of the native families."""
    model: "PreTrainedModel | None" = None
    """Elsewhere: transformers' model without memory, which knows how names in memory become names of files."""

    def in_memory(self) -> dict[str, tuple[int, ...]]:
        """The same under the names a training process has; they differ where transformers fuses weights."""
        if self.model is None:
            return self.shapes
        return {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}


def expected_of(folder: Path) -> Expected:
    """What the config.json of this folder calls for; no code of the model's own is run."""
    raw = read_raw_config(folder)
    kind, classes = raw.get("model_type"), raw.get("architectures") or [ARCHITECTURES.get(str(raw.get("model_type")))]
    if isinstance(kind, str) and classes == [ARCHITECTURES.get(kind)]:
        try:
            config = config_from_hf(raw)
        except NotNative:
            return _of_transformers(folder, classes)
        except EngineError as error:
            raise EngineError(f"{folder / 'config.json'}: {error}") from None
        shapes: dict[str, tuple[int, ...]] = {
            name: (rows,) if part.columns is None else (rows, part.columns)
            for part in layout(config)
            for name, rows in part.sources
        }
        return Expected(str(folder), shapes, {HEAD: EMBEDDING} if config.tied else {}, config)
    return _of_transformers(folder, classes)


def _of_transformers(folder: Path, classes: object) -> Expected:
    import transformers

    from turnwise.engines.model.transformers.weights import CheckpointNames

    name = classes[0] if isinstance(classes, list) and len(classes) == 1 else None
    model_class = getattr(transformers, name, None) if isinstance(name, str) and name.isidentifier() else None
    if not isinstance(model_class, type) or not issubclass(model_class, transformers.PreTrainedModel):
        raise EngineError(
            f"{folder / 'config.json'}: transformers {transformers.__version__} has no class {name!r}, so nobody can "
            "say which tensors the model has; code that comes with a model is not run here"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        layers = getattr(config.get_text_config(), "num_hidden_layers", None)
        if isinstance(layers, int) and layers > MOST_LAYERS:
            raise EngineError(f"num_hidden_layers {layers} is more than the {MOST_LAYERS} supported")
        with torch.device("meta"):
            model = model_class(config)
    except Exception as error:  # the library raises whatever the first broken field makes it stumble over
        raise EngineError(f"{folder / 'config.json'} cannot be read: {one_line(error)[:300]}") from error
    model._weight_conversions = None
    shapes = CheckpointNames(model).shapes(dict(model.state_dict()))
    tied = {str(name): str(other) for name, other in getattr(model, "all_tied_weights_keys", {}).items()}
    return Expected(str(folder), shapes, {a: b for a, b in tied.items() if b in shapes}, None, model)


def fitting(tensors: Mapping[str, Stored], expected: Expected, where: str) -> dict[str, Stored]:
    """The tensors under the names of files, all of them and no other; a tied one must repeat its origin and is left."""
    useful = {name: stored for name, stored in tensors.items() if not name.endswith(ROTARY)}
    if expected.model is not None and not expected.shapes.keys() <= useful.keys():
        useful = _outward(useful, expected)
    surplus = sorted(useful.keys() - expected.shapes.keys() - expected.tied.keys())
    missing = sorted(expected.shapes.keys() - useful.keys())
    for name in list(missing):  # a trainer may keep the other of two that are one
        twin = next((other for other, origin in expected.tied.items() if origin == name and other in useful), None)
        if twin is not None:
            useful[name] = useful.pop(twin)
            missing.remove(name)
    if missing or surplus:
        problems = [f"{kind} {listed(names)}" for kind, names in (("lacks", missing), ("holds", surplus)) if names]
        raise EngineError(f"{where} {', and '.join(problems)}: not the model of {expected.where}/config.json")
    for name, shape in expected.shapes.items():
        if useful[name].shape != shape:
            raise EngineError(f"{where}: {name} is {useful[name].shape}, {expected.where}/config.json says {shape}")
    fitted = {name: useful[name] for name in expected.shapes}
    for name, origin in expected.tied.items():
        if name in useful and origin in fitted and name not in fitted:
            fitted[origin] = repeated(useful[name], fitted[origin], name, origin, where)
    return fitted


def repeated(tied: Stored, origin: Stored, name: str, other: str, where: str) -> Stored:
    """The origin, which is compared with its copy when it is read."""

    def read() -> Tensor:
        tensor = origin.read()
        if not same_bits(tensor, tied.read()):
            raise EngineError(
                f"{where}: {name} differs from {other}, and config.json ties them: set tie_word_embeddings to false "
                "there to keep both"
            )
        return tensor

    return Stored(origin.dtype, origin.shape, read)


def _outward(tensors: Mapping[str, Stored], expected: Expected) -> dict[str, Stored]:
    """Tensors named as in memory under the names of files; a layer is converted at once, and the last one is kept."""
    from turnwise.engines.model.transformers.weights import CheckpointNames

    assert expected.model is not None
    shapes = expected.in_memory()
    if not tensors.keys() >= shapes.keys() - expected.tied.keys():
        return dict(tensors)  # neither: what is missing will be named
    model = expected.model
    held: dict[str, dict[str, Tensor]] = {}
    converted: dict[str, Stored] = {}
    for group in _groups(tensors):
        empty = {name: torch.empty(tensors[name].shape, dtype=tensors[name].dtype, device="meta") for name in group}
        key = group[0]

        def read(name: str, key: str = key, group: list[str] = group) -> Tensor:
            if key not in held:
                held.clear()
                held[key] = dict(CheckpointNames(model).outward({each: tensors[each].read() for each in group}))
            return held[key][name]

        for name, tensor in CheckpointNames(model).outward(empty):  # each is of one group: it remembers its names
            converted[name] = Stored(tensor.dtype, tuple(tensor.shape), _bound(read, name))
    return converted


def _bound(read: Callable[[str], Tensor], name: str) -> Callable[[], Tensor]:
    return lambda: read(name)


def _groups(names: Iterable[str]) -> list[list[str]]:
    """The names of each layer; those of no layer stand by themselves."""
    from turnwise.engines.model.transformers.weights import LAYER

    groups: dict[str, list[str]] = {}
    for name in names:
        match = LAYER.match(name)
        groups.setdefault(match.group() if match else name, []).append(name)
    return list(groups.values())


def check_numbers(name: str, tensor: Tensor, was: torch.dtype, where: str) -> None:
    """Refuse what no model computes with."""
    if tensor.dtype.is_floating_point and not bool(tensor.isfinite().all()):
        narrow = f" as {tensor.dtype}: its {was} do not fit" if tensor.dtype != was else ""
        raise EngineError(f"{where}: {name} holds NaN or infinite numbers{narrow}")
