"""What samplers and learners ask of a model before they run it: its sizes, its caches, and what it cannot do."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one attention layer keeps of a token."""

    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What samplers and learners ask before they run a model."""

    vocab_size: int
    hidden_size: int
    context_length: int
    caches: tuple[LayerCache, ...]
    """By layer of attention, in the order of their numbers."""
    no_packing: str | None = None
    """Why several sequences cannot share a pass, such as a recurrent layer by name; None when they can."""
    no_caching: str | None = None
    """Why a sequence cannot be continued from keys and values alone."""
    no_graphs: str | None = None
    """Why a pass cannot be captured in a CUDA graph, such as an operation whose result the host waits for."""
