"""The two forward passes of the sampler: the next chunk of some prompts, and one more token of every active row."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turnwise.engines.model.attention import Chunk, KeyValueStore, Regime, cached_decode, cached_prefill, pad_rows
from turnwise.engines.model.policy_model import ImageFeatures, ModelInputs, PolicyModel
from turnwise.engines.samplers.prompt_images import PromptImages, image_inputs


def prefill(
    model: PolicyModel,
    store: KeyValueStore,
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
            store.layers[0][0].device,
        )
    hidden = model(_inputs(ids, places, store, regime, images), cached_prefill(store, chunks, regime))
    last = torch.tensor([len(part) for part in token_ids]).cumsum(0) - 1
    return model.logits(pad_rows(hidden.index_select(0, last.to(hidden.device)), regime))[: len(chunks)]


def decode(
    model: PolicyModel,
    store: KeyValueStore,
    token_ids: NDArray[np.int64],
    places: NDArray[np.int64],
    regime: Regime,
    shifts: NDArray[np.int64] | None = None,
) -> Tensor:
    """Feed row i its token at its place, for rows 0 to n, and return the logits [n, V]; `shifts` are what images before
    it add to its position."""
    at = torch.from_numpy(places)
    positions = at if shifts is None else torch.from_numpy(places + shifts)
    hidden = model(_inputs(torch.from_numpy(token_ids), positions, store, regime), cached_decode(store, at, regime))
    return model.logits(hidden)[: len(token_ids)]


def _inputs(
    ids: Tensor, places: Tensor, store: KeyValueStore, regime: Regime, images: ImageFeatures | None = None
) -> ModelInputs:
    """The model's inputs, padded to the regime's rows, on the device of the cache."""
    device = store.layers[0][0].device
    at = pad_rows(places, regime) if places.dim() == 1 else pad_rows(places.t(), regime).t()
    return ModelInputs(pad_rows(ids, regime).to(device), at.to(device), images)
