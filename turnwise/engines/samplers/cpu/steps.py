"""The two forward passes of the sampler: the next chunk of some prompts, and one more token of every active row."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turnwise.engines.model.attention import Chunk, Regime, cached_decode, cached_prefill, pad_rows
from turnwise.engines.model.policy_model import ImageFeatures, ModelInputs, PolicyModel
from turnwise.engines.model.recurrence import Recurrence
from turnwise.engines.model.routing import Routing
from turnwise.engines.samplers.in_flight import RunningRequest
from turnwise.engines.samplers.kv_cache import ActiveRows
from turnwise.engines.samplers.prompt_images import PromptImages, image_inputs


def prefill(
    model: PolicyModel,
    store: ActiveRows,
    chunks: Sequence[Chunk],
    token_ids: Sequence[NDArray[np.int64]],
    regime: Regime,
    all_prompt_images: Sequence[PromptImages | None] = (),
) -> Tensor:
    """Feed each chunk's tokens and return the logits [len(chunks), V] behind its last one; `all_prompt_images`
    are given where any of the sequences has images."""
    ids = torch.from_numpy(np.concatenate(token_ids))
    images = None
    if not any(all_prompt_images):
        places = torch.cat([torch.arange(chunk.start, chunk.end) for chunk in chunks])
    else:
        places, images = image_inputs(
            [
                (chunk.start, chunk.end, prompt_images)
                for chunk, prompt_images in zip(chunks, all_prompt_images, strict=True)
            ],
            store.device,
        )
    recurrence = None
    if store.states:
        rows = torch.tensor([chunk.row for chunk in chunks])
        recurrence = Recurrence(tuple(chunk.length for chunk in chunks), store.states, rows)
    routing = Routing() if store.experts else None
    inputs = _inputs(ids, places, store, regime, images, recurrence, routing)
    hidden = model(inputs, cached_prefill(store, chunks, regime))
    if routing is not None:
        counts = torch.tensor([chunk.length for chunk in chunks])
        rows = torch.tensor([chunk.row for chunk in chunks]).repeat_interleave(counts)
        store.note(rows, torch.cat([torch.arange(chunk.start, chunk.end) for chunk in chunks]), routing)
    last = torch.tensor([len(part) for part in token_ids]).cumsum(0) - 1
    return model.logits(pad_rows(hidden.index_select(0, last.to(hidden.device)), regime))[: len(chunks)]


def decode(
    model: PolicyModel,
    store: ActiveRows,
    token_ids: NDArray[np.int64],
    places: NDArray[np.int64],
    regime: Regime,
    shifts: NDArray[np.int64] | None = None,
) -> Tensor:
    """Feed row i its token at its place, for rows 0 to n, and return the logits [n, V]; `shifts` are what images before
    it add to its position."""
    at = torch.from_numpy(places)
    positions = at if shifts is None else torch.from_numpy(places + shifts)
    recurrence = Recurrence((1,) * len(token_ids), store.states) if store.states else None
    routing = Routing() if store.experts else None
    inputs = _inputs(torch.from_numpy(token_ids), positions, store, regime, recurrence=recurrence, routing=routing)
    hidden = model(inputs, cached_decode(store, at, regime))
    if routing is not None:
        store.note(torch.arange(len(at)), at, routing)
    return model.logits(hidden)[: len(token_ids)]


def up_to_shared(work: Sequence[tuple[RunningRequest, Chunk]]) -> list[tuple[RunningRequest, Chunk]]:
    """Of the prompts whose shared beginning ends within their chunk what comes before that end: states of recurrent
    layers can only be kept where they stand."""
    cut = []
    for running, chunk in work:
        end = running.request.blocks[-1].end if running.shareable and running.request.blocks else 0
        if chunk.start < end < chunk.end:
            cut.append((running, Chunk(chunk.row, chunk.start, end)))
    return cut


def _inputs(
    ids: Tensor,
    places: Tensor,
    store: ActiveRows,
    regime: Regime,
    images: ImageFeatures | None = None,
    recurrence: Recurrence | None = None,
    routing: Routing | None = None,
) -> ModelInputs:
    """The model's inputs, padded to the regime's rows, on the device of the cache."""
    at = pad_rows(places, regime) if places.dim() == 1 else pad_rows(places.t(), regime).t()
    return ModelInputs(pad_rows(ids, regime).to(store.device), at.to(store.device), images, recurrence, routing)
