"""What a transformers model really does, found by running a handful of tokens through it before anyone relies on it."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from turnwise.engines.model import attention
from turnwise.engines.model.attention import KEY_PAD, Chunk, Regime, cached_decode, cached_prefill, packed
from turnwise.engines.model.config_fields import compressed_layers
from turnwise.engines.model.policy_model import Attend, LayerCache, ModelShape, StateShape
from turnwise.engines.model.recurrence import Recurrence, empty_states
from turnwise.engines.model.token_logprobs import LogitShape
from turnwise.engines.model.transformers.attention import FACTS, OURS, WATCHED, AttentionLayer, AttentionWatch
from turnwise.engines.model.transformers.recurrent_layers import (
    RecurrentLayer,
    find_recurrent,
    go_on_one_by_one,
    steps_at_their_bound,
)
from turnwise.errors import EngineError, one_line

TOKENS, BEFORE, KEPT = 11, 6, 8
"""Tokens of a probe, of the sequence packed before it, and of its part that goes through the cache first."""
EXACT, NARROW = 1e-3, 0.1
"""How far two ways may differ, as a share of the states' norm: in float32, and where numbers have fewer digits."""

MULTIPLIERS = ("logits_scaling", "logit_scale", "lm_head_multiplier", "output_multiplier")
"""What configs call a factor of the logits, or its inverse."""

Base = Callable[[Tensor, Tensor, Attend | AttentionWatch, Recurrence | None], Tensor]
"""base(tokens [T], positions [T], attend, recurrence) -> hidden states [T, H]."""


@dataclass(frozen=True, slots=True)
class Probed:
    """What was found: what every attention layer keeps, what is done to logits, and what must not be done."""

    caches: tuple[LayerCache, ...]
    logits: LogitShape
    no_packing: str | None
    no_caching: str | None
    no_graphs: str | None
    states: tuple[StateShape, ...]
    """What every recurrent layer keeps."""


@dataclass(frozen=True, slots=True)
class ProbeFindings:
    """What one model was found to do, for others of the same code: plain data that may go to another process."""

    logits: LogitShape
    recomputes: bool
    shape: ModelShape
    layers: dict[str, AttentionLayer]
    """By the names of attention modules in the decoder."""
    recurrent: dict[str, RecurrentLayer]
    """By the names of recurrent modules."""


class _Stage(Enum):
    """The ways in which a model is tried, one after another."""

    BY_ITSELF = auto()
    WATCHED = auto()
    OURS = auto()


_IN_THE_WAY = {
    _Stage.BY_ITSELF: "transformers cannot run {} as config.json describes it",
    _Stage.WATCHED: "{} attends by code of its own, which Turnwise cannot supply",
    _Stage.OURS: "{} works on the attention mask in its own layers, and our attention has none",
}
"""What it means that a model fails in one; the words of its own code follow for those who know it."""


@dataclass(slots=True)
class _Rows:
    """The key-value cache of a single sequence, a pair of tensors for each layer."""

    layers: list[tuple[Tensor, Tensor]]


def probe(model: PreTrainedModel, decoder: PreTrainedModel, base: Base) -> Probed:
    """Leaves its facts on every attention module, so that `attention` finds them, and the decoder in our hands."""
    if (kind := compressed_layers(model.config.get_text_config())) is not None:
        raise EngineError(f"{type(model).__name__}: {kind}")
    stages = [_Stage.BY_ITSELF]
    try:
        return _probe(model, decoder, base, stages)
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:
        # Code of others, called in a way that it need not have been written for.
        where = traceback.extract_tb(error.__traceback__)[-1].name
        detail = f"({one_line(error)[:200]}, in {where})"
        raise EngineError(f"{_IN_THE_WAY[stages[-1]].format(type(model).__name__)} {detail}") from error


@torch.no_grad()
def _probe(model: PreTrainedModel, decoder: PreTrainedModel, base: Base, stages: list[_Stage]) -> Probed:
    device = model.get_input_embeddings().weight.device
    vocab = model.get_output_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(vocab, (BEFORE + TOKENS,), generator=generator).to(device)
    before, tokens = drawn[:BEFORE], drawn[BEFORE:]
    places = torch.arange(TOKENS, device=device)
    with under(decoder, "eager"):
        if decoder.config._attn_implementation != "eager":  # it does not let itself be told, and only logs that
            raise _attends_alone(model)
        theirs = model(input_ids=tokens[None], use_cache=False).logits[0].float()
    stages.append(_Stage.WATCHED)
    watch = AttentionWatch(packed([TOKENS], device), [])
    with under(decoder, WATCHED):
        base(tokens, places, watch, None)
    with under(decoder, "eager"):
        states = tuple(find_recurrent(model, decoder, tokens))
    if not watch.layers and not states:
        raise _attends_alone(model)
    for module, layer in watch.layers:
        setattr(module, FACTS, layer)
    stages.append(_Stage.OURS)
    decoder.set_attn_implementation(OURS)
    host = _WaitsOfTheHost()  # type: ignore[no-untyped-call]
    with host:
        alone = base(tokens, places, packed([TOKENS], device), None)
    logits = _logit_shape(model, alone, theirs)
    both, lengths = attention.positions([BEFORE, TOKENS]).to(device), (BEFORE, TOKENS)
    behind = base(torch.cat((before, tokens)), both, packed(lengths, device), Recurrence(lengths))[BEFORE:]
    no_packing = None if alike(behind, alone) else _leak(model, base, before, tokens)
    layers = [layer for _, layer in watch.layers]
    continued = _continued(base, tokens, layers, states, alone.dtype, host)
    if states and not alike(continued, alone):
        go_on_one_by_one(decoder)
        continued = _continued(base, tokens, layers, states, alone.dtype, host)
    no_caching = None if alike(continued, alone) else no_packing
    if no_caching is None and not alike(continued, alone):
        no_caching = _no_going_on(model) if states else _leak(model, base, before, tokens)
    with steps_at_their_bound(decoder) as bounded:
        if bounded and no_caching is None:
            continued = _continued(base, tokens, layers, states, alone.dtype, host)
            whole = base(tokens, places, packed([TOKENS], device), Recurrence((TOKENS,)))
            no_caching = None if alike(continued, whole) else _no_going_on(model)
    caches = tuple(layer.cache for _, layer in watch.layers)
    no_graphs = f"{type(model).__name__} calls {host.found}, for which the host waits" if host.found else None
    return Probed(caches, logits, no_packing, no_caching, no_graphs, states)


def _no_going_on(model: PreTrainedModel) -> str:
    return f"recurrent layers of {type(model).__name__} do not go on from a kept state"


def _attends_alone(model: PreTrainedModel) -> EngineError:
    return EngineError(f"{type(model).__name__} attends by code of its own, which Turnwise cannot supply")


class _WaitsOfTheHost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the first operation whose result, or its size, the host must know: a GPU's would stand in a graph's way."""

    found: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tagged = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        # Indexing is tagged for the masks it may be given; numbers of rows are known beforehand.
        harmless = func.overloadpacket is torch.ops.aten.index and all(
            index is None or index.dtype not in (torch.bool, torch.uint8) for index in args[1]
        )
        if tagged and not harmless and self.found is None:
            self.found = str(func)
        return func(*args, **(kwargs or {}))


@contextmanager
def under(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Inside, the model attends so."""
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def alike(ours: Tensor, theirs: Tensor) -> bool:
    """Every token in float32. Fewer digits make a router choose other experts for a token here and there: most then."""
    apart = (ours - theirs).float().norm(dim=-1) / theirs.float().norm(dim=-1).clamp(min=1e-6)
    if theirs.dtype is torch.float32 and ours.dtype is torch.float32:
        return bool(apart.max() < EXACT)
    return bool(apart.median() < NARROW)


def _logit_shape(model: PreTrainedModel, hidden: Tensor, theirs: Tensor) -> LogitShape:
    """The way from states to logits that gives the model's own; families name and use their multipliers differently."""
    head = model.get_output_embeddings()
    products = functional.linear(hidden, head.weight, head.bias).float()
    config: Any = model.config.get_text_config()
    named = [getattr(config, name, None) for name in MULTIPLIERS]
    scales = [1.0, *(scale for value in named if value for scale in (value, 1.0 / value))]
    cap = getattr(config, "final_logit_softcapping", None)
    for softcap in (cap, None) if cap else (None,):
        for scale in scales:
            shape = LogitShape(float(scale), softcap)
            if alike(shape.apply(products.clone()).to(hidden.dtype), theirs.to(hidden.dtype)):
                return shape
    raise EngineError(
        f"{type(model).__name__} gives other logits with Turnwise's attention than with its own: it uses its states, "
        "positions or logits in a way that Turnwise does not know"
    )


def _continued(
    base: Base,
    tokens: Tensor,
    layers: list[AttentionLayer],
    states: tuple[StateShape, ...],
    dtype: torch.dtype,
    host: "_WaitsOfTheHost",
) -> Tensor:
    """The states when most of the sequence is fed first, the rest after it, and its last token alone."""
    rows = _Rows([])
    for cache in (layer.cache for layer in layers):
        shapes = ((1, cache.kv_heads, cache.key_dim, KEY_PAD), (1, cache.kv_heads, KEY_PAD, cache.value_dim))
        keys, values = (torch.zeros(shape, dtype=dtype, device=tokens.device) for shape in shapes)
        rows.layers.append((keys, values))
    regime = Regime(1, 2, KEY_PAD)
    places = torch.arange(TOKENS, device=tokens.device)
    carried, parts = empty_states(states, 1, tokens.device), []
    for start, end in ((0, KEPT), (KEPT, TOKENS - 1)):
        attend = cached_prefill(rows, [Chunk(0, start, end)], regime)
        parts.append(base(tokens[start:end], places[start:end], attend, Recurrence((end - start,), carried)))
    decoding = cached_decode(rows, places[-1:], regime)
    with host if states else nullcontext():
        parts.append(base(tokens[-1:], places[-1:], decoding, Recurrence((1,), carried)))
    return torch.cat(parts)


def _leak(model: PreTrainedModel, base: Base, before: Tensor, tokens: Tensor) -> str:
    """The first module through which one packed sequence reaches the next, by changing the first and looking for one
    that gives another output for the same input."""
    runs: list[dict[str, tuple[Tensor, Tensor]]] = []
    hooks = []

    def behind(values: Any) -> Tensor | None:
        for value in values:
            if isinstance(value, Tensor) and value.dim() == 3 and value.shape[:2] == (1, BEFORE + TOKENS):
                return value[0, BEFORE:].float()
        return None

    def watch(name: str) -> Callable[[nn.Module, Any, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, named: Any, output: Any) -> None:
            entered = behind((*inputs, *named.values()))
            left = behind(output if isinstance(output, tuple) else (output,))
            if entered is not None and left is not None:
                runs[-1].setdefault(name, (entered, left))

        return hook

    for name, module in model.named_modules():
        hooks.append(module.register_forward_hook(watch(name), with_kwargs=True))
    places = attention.positions([BEFORE, TOKENS]).to(tokens.device)
    try:
        for first in (before, before.flip(0)):
            runs.append({})
            lengths = (BEFORE, TOKENS)
            base(torch.cat((first, tokens)), places, packed(lengths, tokens.device), Recurrence(lengths))
    finally:
        for hook in hooks:
            hook.remove()
    for name in (name for name in runs[0] if name in runs[1]):
        (entered, left), (same, other) = runs[0][name], runs[1][name]
        if torch.equal(entered, same) and not torch.equal(left, other):
            module = model.get_submodule(name)
            return f"{type(module).__name__} ({name}) carries a state from token to token that is not attention"
    return f"{type(model).__name__} takes something of a sequence from what else is in the pass"
