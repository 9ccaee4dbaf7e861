"""The recurrent layers of a transformers model (Mamba, gated delta nets, short convolutions), each sequence by itself.

Which modules these are is found by watching who uses the cache that transformers keeps states in. Their class then
becomes one that computes the sequences of a pass apart, from the states it is given, by their own code.
"""

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from turnwise.engines.model.policy_model import StateShape
from turnwise.engines.model.recurrence import Recurrence, States
from turnwise.engines.model.transformers.attention import CURRENT
from turnwise.errors import EngineError

SEQUENCES: ContextVar[Recurrence | None] = ContextVar("turnwise_recurrence", default=None)
LAYER = "turnwise_recurrent_layer"
Output = Tensor | tuple[Tensor, ...]
CACHE_NAMES = ("cache_params", "past_key_values", "past_key_value")


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """What is known of one recurrent module once it was watched."""

    number: int
    cache_name: str
    """The parameter of its forward that takes the cache."""
    kept: tuple[tuple[bool, int], ...]
    """Of each of its states whether it is a convolution's, and its number in transformers' cache."""
    shape: StateShape
    one_by_one: bool = False
    """Whether it goes on from its states by one token at a time only (Mamba-1)."""


class _WatchedCache(DynamicCache):  # type: ignore[misc]
    """Notes which module uses the state of a layer."""

    def __init__(self, config: Any, calls: list[nn.Module]) -> None:
        super().__init__(config=config)
        self.users: dict[nn.Module, int] = {}
        self._calls = calls

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """transformers does not answer where no layer attends; nothing was here before the pass that is watched."""
        attends = any(isinstance(layer, CacheLayerMixin) for layer in self.layers)
        return int(super().get_seq_length(layer_idx)) if attends else 0

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **further: Any) -> Tensor:
        self.users.setdefault(self._calls[-1], layer_idx)
        full: Tensor = super().update_conv_state(conv_states, layer_idx, state_idx, **further)
        return full

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **further: Any
    ) -> Tensor:
        self.users.setdefault(self._calls[-1], layer_idx)
        state: Tensor = super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **further)
        return state


class _Carried:
    """The states of one layer for some sequences, as its code asks a cache of transformers for them."""

    def __init__(self, facts: RecurrentLayer, states: States) -> None:
        self._layer = LinearAttentionLayer(1 + max(number for _, number in facts.kept))
        for (is_convolution, number), state in zip(facts.kept, states, strict=True):
            if is_convolution:
                self._layer.conv_states[number] = state
                self._layer.conv_kernel_size[number] = state.shape[-1]
                self._layer.is_conv_states_initialized[number] = True
            else:
                self._layer.recurrent_states[number] = state
                self._layer.is_recurrent_states_initialized[number] = True
            self._layer.has_previous_state[number] = True

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return True

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        state: Tensor | None = self._layer.conv_states[state_idx]
        return state

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        state: Tensor | None = self._layer.recurrent_states[state_idx]
        return state

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **further: Any) -> Tensor:
        full: Tensor = self._layer.update_conv_state(conv_states, state_idx, **further)
        return full

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **further: Any
    ) -> Tensor:
        state: Tensor = self._layer.update_recurrent_state(recurrent_states, state_idx, **further)
        return state


def keeps_states(config: Any) -> bool:
    """Whether transformers keeps states for a model of this config."""
    return any(isinstance(layer, LinearAttentionLayer) for layer in DynamicCache(config=config).layers)


def find_recurrent(model: PreTrainedModel, decoder: PreTrainedModel, tokens: Tensor) -> list[StateShape]:
    """Let the recurrent modules compute sequences apart from now on; what each keeps, none where there are none."""
    calls: list[nn.Module] = []
    cache = _WatchedCache(model.config.get_text_config(), calls)
    parameters = inspect.signature(decoder.forward).parameters
    name = next((name for name in CACHE_NAMES if name in parameters), None)
    if name is None or not keeps_states(model.config.get_text_config()):
        return []
    try:
        with _following(decoder, calls):
            decoder(input_ids=tokens[None], use_cache=True, **{name: cache})
    except ValueError as error:  # without a cache it computed
        raise EngineError(
            f"{type(model).__name__} keeps states in a cache of its own, which Turnwise does not know"
        ) from error
    for number, (module, index) in enumerate(cache.users.items()):
        facts = _facts(module, number, cache.layers[index])
        setattr(module, LAYER, facts)
        module.__class__ = _apart(type(module))  # type: ignore[arg-type]
    return [getattr(module, LAYER).shape for module in cache.users]


def go_on_one_by_one(decoder: nn.Module) -> None:
    """Have every recurrent layer go on from a state token by token, whatever it is given."""
    for module in decoder.modules():
        if hasattr(module, LAYER):
            setattr(module, LAYER, replace(getattr(module, LAYER), one_by_one=True))


@contextmanager
def steps_at_their_bound(decoder: nn.Module) -> Iterator[bool]:
    """Inside, steps of time are so far below the least one that a layer which does not bound them shows it; whether
    there are any with a bound."""
    bounded: list[Any] = [module for module in decoder.modules() if hasattr(module, LAYER) and _step_limits(module)]
    before = [module.time_step_limit for module in bounded]
    for module in bounded:
        module.time_step_limit = (2.0, math.inf)
    try:
        yield bool(bounded)
    finally:
        for module, limits in zip(bounded, before, strict=True):
            module.time_step_limit = limits


def _step_limits(module: nn.Module) -> tuple[float, float] | None:
    """The least and the longest step of time of a layer, where it has such."""
    limits: Any = getattr(module, "time_step_limit", None)
    return None if limits is None or tuple(limits) == (0.0, math.inf) else tuple(limits)


@contextmanager
def _bounded_steps(module: nn.Module, width: int) -> Iterator[None]:
    """transformers bounds the steps of time where there are several tokens, and not those of a single one (Zamba2,
    Nemotron-H); inside, it bounds them there too: they are the last columns of the first projection."""
    limits, projection = _step_limits(module), getattr(module, "in_proj", None)
    if width > 1 or limits is None or not isinstance(projection, nn.Module):
        yield
        return
    bias: Tensor = module.dt_bias  # type: ignore[assignment]
    least, most = (number if number in (0.0, math.inf) else math.log(math.expm1(number)) for number in limits)

    def bound(projection: nn.Module, entered: Any, made: Tensor) -> Tensor:
        shift = bias.detach().to(made.dtype)
        steps = made[..., -len(bias) :]
        bounded = steps.clamp(least - shift if least else None, most - shift if math.isfinite(most) else None)
        return torch.cat([made[..., : -len(bias)], bounded], dim=-1)

    hook = projection.register_forward_hook(bound)
    try:
        yield
    finally:
        hook.remove()


def take_recurrent(module: nn.Module, facts: RecurrentLayer) -> None:
    """Make a module what another of the same code was found to be."""
    if not hasattr(module, LAYER):
        setattr(module, LAYER, facts)
        module.__class__ = _apart(type(module))  # type: ignore[arg-type]


@contextmanager
def _following(decoder: nn.Module, calls: list[nn.Module]) -> Iterator[None]:
    """Inside, `calls` ends with the module that is being computed."""
    hooks = []
    for module in decoder.modules():
        hooks.append(module.register_forward_pre_hook(lambda module, entered: calls.append(module)))
        hooks.append(module.register_forward_hook(lambda module, entered, left: calls.pop() and None))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _facts(module: nn.Module, number: int, layer: LinearAttentionLayer) -> RecurrentLayer:
    cache_name = next((name for name in CACHE_NAMES if name in inspect.signature(module.forward).parameters), None)
    if cache_name is None:
        raise EngineError(f"{type(module).__name__} keeps a state in a cache that it is not handed")
    kept, states = [], []
    for is_convolution, each in ((True, layer.conv_states), (False, layer.recurrent_states)):
        for index, state in each.items():
            if state is not None:
                kept.append((is_convolution, index))
                states.append(state)
    shape = StateShape(tuple(tuple(state.shape[1:]) for state in states), tuple(state.dtype for state in states))
    return RecurrentLayer(number, cache_name, tuple(kept), shape)


@functools.cache
def _apart(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of a recurrent module that computes each sequence by itself, under the same name."""
    names = [*inspect.signature(kind.forward).parameters][1:]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Output:
        recurrence = SEQUENCES.get()
        if recurrence is None:
            whole: Output = kind.forward(self, *args, **kwargs)
            return whole
        named = dict(zip(names, args, strict=False)) | kwargs
        return _each_sequence(self, kind.forward, named, recurrence)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _each_sequence(
    module: nn.Module, run: Callable[..., Output], named: Mapping[str, Any], recurrence: Recurrence
) -> Output:
    """[1, T, ...] of the module for each sequence of a pass by itself; several where it makes
    queries, keys and values."""
    facts: RecurrentLayer = getattr(module, LAYER)
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    total = next(iter(tensors.values())).shape[1]
    by_token = {name: value[0] for name, value in tensors.items() if value.shape[:2] == (1, total)}
    states = None if recurrence.states is None else recurrence.states[facts.number]
    parts: list[tuple[Tensor, ...]] = []
    several = False
    for rectangle in recurrence.rectangles:
        cache, taken = None, None if states is None else rectangle.taken(recurrence, states)
        if taken is not None:
            cache = _Carried(facts, taken)
        cut = {name: rectangle.of(value) for name, value in by_token.items()}
        steps = rectangle.width if facts.one_by_one and cache is not None else 1
        outs = []
        for step in zip(*(value.chunk(steps, dim=1) for value in cut.values()), strict=True):
            handed = {**named, **dict(zip(cut, step, strict=True)), facts.cache_name: cache}
            with _bounded_steps(module, rectangle.width // steps if cache is not None else rectangle.width + 1):
                out = run(module, **handed)
            several = isinstance(out, tuple)
            outs.append(out if isinstance(out, tuple) else (out,))
            size = (rectangle.count, rectangle.width // steps)
            if not all(isinstance(one, Tensor) and one.shape[:2] == size for one in outs[-1]):
                raise EngineError(f"{type(module).__name__} gives something else than one state for each token")
        joined = outs[0] if steps == 1 else tuple(torch.cat(each, dim=1) for each in zip(*outs, strict=True))
        parts.append(tuple(each.flatten(0, 1) for each in joined))
        if states is not None and taken is not None:
            rectangle.give_back(recurrence, states, taken)
    whole = tuple(recurrence.put_together(each, total).unsqueeze(0) for each in zip(*parts, strict=True))
    return whole if several else whole[0]


def recomputed(function: Callable[..., Any], *args: Any) -> Any:
    """Checkpointing of a layer that finds our attention and the pass's sequences again in the backward pass."""
    attend, recurrence = CURRENT.get(), SEQUENCES.get()

    def again(*args: Any) -> Any:
        before = CURRENT.set(attend), SEQUENCES.set(recurrence)
        try:
            return function(*args)
        finally:
            CURRENT.reset(before[0])
            SEQUENCES.reset(before[1])

    return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False)
