"""The routers of a transformers model: which modules choose experts, and how their choice is noted or replaced.

A router's code takes the `topk` of a row of scores for each token. That call is found by watching, and from then on
answered with the experts that a pass is given: whatever the family makes of the chosen scores, it makes of theirs,
with gradient.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from turnwise.engines.model.attention import packed
from turnwise.engines.model.policy_model import Attend
from turnwise.engines.model.routing import RouterShape, Routing
from turnwise.errors import EngineError

ROUTING: ContextVar[Routing | None] = ContextVar("turnwise_routing", default=None)
ROUTER = "turnwise_router"
SHORT, LONG = 7, 11
"""Tokens of the passes that are watched: a `topk` over the tokens themselves is none over experts."""


@dataclass(frozen=True, slots=True)
class Router:
    """What is known of one router once it was watched."""

    number: int
    call: int
    """Which of the calls of `topk` in its forward chooses the experts."""
    shape: RouterShape


@dataclass(slots=True, eq=False)
class _Seen:
    """A call of `topk` within a module."""

    module: nn.Module
    call: int
    scores: tuple[int, ...]
    chosen: Tensor
    leaves: bool = False
    """Whether the numbers chosen leave the module as they are, or go into one within it."""
    gives_logits: bool = False


class _Watch(TorchFunctionMode):
    """Notes who calls `topk`, by the module that is being computed."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[nn.Module] = []
        self.seen: list[_Seen] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_topk(func) and self.running:
            module = self.running[-1]
            call = sum(seen.module is module for seen in self.seen)
            scores = args[0] if args else (kwargs or {})["input"]
            self.seen.append(_Seen(module, call, tuple(scores.shape), result[1].detach().clone()))
        return result

    def goes_on(self, owner: nn.Module, value: Any) -> None:
        """A value leaves a module or goes into one within it."""
        for part in value if isinstance(value, tuple | list) else (value,):
            if isinstance(part, Tensor) and not part.is_floating_point():
                for seen in self.seen:
                    if seen.module is owner and seen.chosen.shape == part.shape and torch.equal(seen.chosen, part):
                        seen.leaves = True


class _Choosing(TorchFunctionMode):
    """Inside, one call of `topk` is answered as the pass wants it."""

    def __init__(self, router: Router, routing: Routing) -> None:
        super().__init__()
        self._router, self._routing, self._calls = router, routing, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not _is_topk(func):
            return result
        self._calls += 1
        if self._calls - 1 != self._router.call:
            return result
        chosen = self._routing.choose(self._router.number, result[1])
        if chosen is result[1]:
            return result
        scores = args[0] if args else (kwargs or {})["input"]
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


def find_routers(
    name: str, decoder: nn.Module, base: Callable[[Tensor, Tensor, Attend], Tensor], device: torch.device
) -> tuple[RouterShape, ...]:
    """Let the routers of a decoder be told what to choose from now on. `base(tokens, positions, attend)` computes its
    states; EngineError for a model without routers, or of which some choose in a way that cannot be replaced."""

    def run(count: int) -> Tensor:
        places = torch.arange(count, device=device)
        return base(places, places, packed([count], device))

    short, long = (_watched(decoder, functools.partial(run, tokens)) for tokens in (SHORT, LONG))
    if len(short) != len(long):
        raise EngineError(f"{name} chooses in other ways when it has more tokens")
    routers: dict[nn.Module, _Seen] = {}
    for before, seen in zip(short, long, strict=True):
        if before.scores == (SHORT, seen.scores[-1]) and seen.scores == (LONG, seen.scores[-1]):
            routers[seen.module] = seen  # the last of a module: others choose groups of experts
    if not routers:
        raise EngineError(f"{name} has no routers that choose experts by their scores")
    for number, (module, seen) in enumerate(routers.items()):
        if not seen.leaves:
            raise EngineError(f"{type(module).__name__} makes something else of the experts it chooses")
        shape = RouterShape(seen.scores[-1], seen.chosen.shape[-1], seen.gives_logits)
        setattr(module, ROUTER, Router(number, seen.call, shape))
        module.__class__ = _told(type(module))  # type: ignore[arg-type]
    shapes = tuple(getattr(module, ROUTER).shape for module in routers)
    if len({shape.top_k for shape in shapes}) > 1:
        raise EngineError(f"the routers of {name} choose different numbers of experts")
    _prove(name, run, shapes)
    return shapes


@torch.no_grad()
def _prove(name: str, run: Callable[[int], Tensor], shapes: tuple[RouterShape, ...]) -> None:
    """What a pass noted gives the same states again, and other experts give others."""
    routing = Routing()
    with within(routing):
        plain = run(LONG)
    noted = routing.noted(torch.int64)
    experts = torch.tensor([shape.experts for shape in shapes], device=noted.device).view(1, -1, 1)
    states = []
    for given in (noted, (noted + 1) % experts):
        with within(Routing(given)):
            states.append(run(LONG))
    again, others = states
    free = any(shape.experts > shape.top_k for shape in shapes)
    if not torch.equal(again, plain) or (free and torch.equal(others, plain)):
        raise EngineError(f"the routers of {name} do not follow the experts that they are given")


@contextmanager
def within(routing: Routing | None) -> Iterator[None]:
    """Inside, routers note their choices in it, or take them from it."""
    before = ROUTING.set(routing)
    try:
        yield
    finally:
        ROUTING.reset(before)


@functools.cache
def _told(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of a router that chooses as its pass wants it, under the same name."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        routing = ROUTING.get()
        if routing is None:
            return kind.forward(self, *args, **kwargs)
        router: Router = getattr(self, ROUTER)
        with _Choosing(router, routing):
            left = kind.forward(self, *args, **kwargs)
        if router.shape.logits:
            routing.logits[router.number] = left[0]
        return left

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


@torch.no_grad()
def _watched(decoder: nn.Module, run: Callable[[], Tensor]) -> list[_Seen]:
    watch = _Watch()
    with _following(decoder, watch), watch:
        run()
    return watch.seen


@contextmanager
def _following(decoder: nn.Module, watch: _Watch) -> Iterator[None]:
    """Inside, the watch knows which module is being computed, what goes into it and what leaves it."""

    def enter(module: nn.Module, entered: Any, named: dict[str, Any]) -> None:
        if watch.running:
            watch.goes_on(watch.running[-1], [*entered, *named.values()])
        watch.running.append(module)

    def leave(module: nn.Module, entered: Any, left: Any) -> None:
        watch.running.pop()
        watch.goes_on(module, left)
        for seen in watch.seen if isinstance(left, tuple) else ():
            if seen.module is module and isinstance(left[0], Tensor) and left[0].shape == seen.scores:
                sums = left[0].float().sum(-1)  # of probabilities, which are no logits, one
                seen.gives_logits = not torch.allclose(sums, torch.ones_like(sums), atol=1e-2)

    hooks = []
    for module in decoder.modules():
        hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        hooks.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _is_topk(func: Any) -> bool:
    return getattr(func, "__name__", "") == "topk"
