"""Our attention under a transformers model: what its layers ask for, and who sees whom decided by the caller."""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from turnwise.engines.model.policy_model import Attend, LayerCache, Mixing
from turnwise.errors import EngineError

OURS, WATCHED = "turnwise", "turnwise_watched"
"""Names of attention implementations. The first gets no mask at all; the second also tells what a mask would hide."""
FACTS = "turnwise_layer"
CURRENT: ContextVar["Attend | AttentionWatch | None"] = ContextVar("turnwise_attend", default=None)
"""For layers that are not handed the keyword arguments of their model."""


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What is known of one attention module once it was watched: its number, its window and what it keeps."""

    number: int
    window: int | None
    cache: LayerCache


@dataclass(slots=True)
class AttentionWatch:
    """Fills `layers` in the order in which the attention modules of a model are called."""

    attend: Attend
    layers: list[tuple[nn.Module, AttentionLayer]]

    def called(
        self, module: nn.Module, k: Tensor, v: Tensor, mask: Tensor | None, sliding_window: int | None
    ) -> AttentionLayer:
        """Note a call; a module that attends twice in a pass could not be told apart from itself."""
        if any(earlier is module for earlier, _ in self.layers):
            raise _unsupported(module, "attends twice in one pass")
        if mask is not None and mask._base is not None and mask._base.shape == mask.shape:
            mask = mask._base  # all of it, by way of a slice
        if mask is not None and not hasattr(mask, "hides_beyond"):
            raise _unsupported(module, "attends with a mask of its own making")
        # The mask decides what a layer sees; the window that is asked for beside it only counts where no mask is made.
        window = sliding_window if mask is None else mask.hides_beyond
        layer = AttentionLayer(len(self.layers), window, LayerCache(k.shape[1], k.shape[3], v.shape[3]))
        self.layers.append((module, layer))
        return layer


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    attend: Attend | AttentionWatch | None = None,
    **further: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every attention layer, with [1, H, T, D]; returns [1, T, Hq, Dv]."""
    attend = attend or CURRENT.get()
    if attend is None:
        raise _unsupported(module, "does not get the attention that its model was called with")
    if dropout:
        raise _unsupported(module, f"wants dropout {dropout} on its attention")
    for name in ("position_bias", "head_mask"):
        if further.get(name) is not None:
            raise _unsupported(module, f"attends with a {name}")
    if query.shape[:1] != (1,) or key.shape[2] != query.shape[2]:
        raise _unsupported(module, f"attends with {query.shape[2]} queries to {key.shape[2]} keys")
    if isinstance(attend, AttentionWatch):
        layer = attend.called(module, key, value, attention_mask, sliding_window)
        attend = attend.attend
    elif attention_mask is not None:
        raise _unsupported(module, "attends with a mask of its own making")
    else:
        layer = getattr(module, FACTS)
    q, k, v = (x[0].transpose(0, 1).to(value.dtype).contiguous() for x in (query, key, value))
    mixed = attend(layer.number, q, k, v, Mixing(scaling, layer.window, softcap, s_aux))
    return mixed.view(1, len(q), q.shape[1], -1), None


def _unsupported(module: nn.Module, what: str) -> EngineError:
    return EngineError(f"{type(module).__name__} {what}, which Turnwise does not support")


def watched_mask(*, mask_function: Any, q_length: int, local_size: int | None = None, **further: Any) -> Tensor:
    """The mask that eager attention would get, with the window it stands for; any other rule is an error."""
    places = _telling_places(local_size or q_length)
    query, key = places.unsqueeze(1), places.unsqueeze(0)
    back = query - key
    expected = (back >= 0) & (back < local_size) if local_size is not None else back >= 0
    try:
        known = not further.get("use_vmap") and torch.equal(_grid(mask_function, query, key), expected)
    except IndexError:  # it looks up something of the tokens there, not only where they are
        known = False
    if not known:
        kind = further["config"].model_type
        raise EngineError(f"{kind} hides tokens by another rule than a causal mask or a sliding window")
    mask: Tensor = eager_mask(mask_function=mask_function, q_length=q_length, local_size=local_size, **further)
    mask.hides_beyond = local_size  # type: ignore[attr-defined]
    return mask


def _telling_places(window: int) -> Tensor:
    """Positions around the edges of a window and of its multiples, where rules differ if they do."""
    near = {multiple * window + shift for multiple in range(4) for shift in (-2, -1, 0, 1, 2)}
    return torch.tensor(sorted(position for position in near if position >= 0))


def _grid(mask_function: Any, query: Tensor, key: Tensor) -> Tensor:
    zero = torch.zeros(1, 1, dtype=torch.long)
    mask: Tensor = mask_function(zero, zero, query, key)
    return mask.expand(query.shape[0], key.shape[1])


AttentionInterface.register(OURS, attention)
AttentionInterface.register(WATCHED, attention)
AttentionMaskInterface.register(WATCHED, watched_mask)
