"""The tiny vision-language model's shape, and a batched forward pass of it for training on images of one size."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

VIEW = 64
"""Pixels of a side of every image the model is shown."""
PATCH, MERGE = 8, 2
GRID = VIEW // PATCH
TOKENS = (GRID // MERGE) ** 2
"""Tokens an image takes."""
TEXT = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": True,
}
VISION = {
    "depth": 3,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_heads": 4,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 1,
    "out_hidden_size": 128,
    "num_position_embeddings": GRID * GRID,
    "deepstack_visual_indexes": [0],
}


def fresh_model(vocabulary: int, ids: dict[str, int], seed: int) -> Qwen3VLForConditionalGeneration:
    """Qwen3-VL of a million parameters with random weights; `ids` names its special tokens."""
    torch.manual_seed(seed)
    text = {**TEXT, "vocab_size": vocabulary, "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]}
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=VISION,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
        dtype="float32",
    )
    return Qwen3VLForConditionalGeneration(config)


def patches(images: torch.Tensor) -> torch.Tensor:
    """Images as bytes, [N, side, side, 3], as the processor hands them to the model: [N, patches, 3 * 8 * 8]."""
    blocks = GRID // MERGE
    scaled = (images.float() / 255.0 - 0.5) / 0.5
    cut = scaled.view(-1, blocks, MERGE, PATCH, blocks, MERGE, PATCH, 3)
    return cut.permute(0, 1, 4, 2, 5, 7, 3, 6).reshape(len(images), GRID * GRID, -1)


def look(model: Qwen3VLForConditionalGeneration, images: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The features of images, [N, tokens, hidden], and those added behind the first layers of text.

    The same as `get_image_features`, which runs each image's attention by itself and is many times slower.
    """
    tower = model.model.visual
    pixels = patches(images)
    weight = tower.patch_embed.proj.weight
    hidden = F.linear(pixels, weight.flatten(1), tower.patch_embed.proj.bias)
    rows, columns = (torch.from_numpy(axis).to(images.device) for axis in _places())
    hidden = hidden + tower.pos_embed.weight[rows * GRID + columns]
    cos, sin = tower.rotary_pos_emb(hidden, torch.stack([rows, columns], dim=-1))
    deep = []
    for number, block in enumerate(tower.blocks):
        hidden = hidden + _attend(block.attn, block.norm1(hidden), cos, sin)
        hidden = hidden + block.mlp(block.norm2(hidden))
        if number in tower.deepstack_visual_indexes:
            merger = tower.deepstack_merger_list[tower.deepstack_visual_indexes.index(number)]
            deep.append(merger(hidden.flatten(0, 1)).view(len(images), TOKENS, -1))
    return tower.merger(hidden.flatten(0, 1)).view(len(images), TOKENS, -1), deep


def _places() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row and column of each patch, in the order of the patches."""
    grid = np.arange(GRID * GRID).reshape(GRID, GRID)
    order = grid.reshape(GRID // MERGE, MERGE, GRID // MERGE, MERGE).transpose(0, 2, 1, 3).reshape(-1)
    return order // GRID, order % GRID


def _attend(attention: Any, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    count, length, width = hidden.shape
    query, key, value = attention.qkv(hidden).view(count, length, 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4)
    query, key = (x * cos + _rotated(x) * sin for x in (query, key))
    mixed = F.scaled_dot_product_attention(query, key, value)
    projected: torch.Tensor = attention.proj(mixed.transpose(1, 2).reshape(count, length, width))
    return projected


def _rotated(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def run_text(
    model: Qwen3VLForConditionalGeneration, token_ids: torch.Tensor, images: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Hidden states of padded conversations, [B, T, hidden]; `images` are theirs in reading order, for a tower at rest.

    Padding stands behind: what comes before never sees it.
    """
    text = model.model.language_model
    embedded = text.embed_tokens(token_ids)
    mask = token_ids == model.config.image_token_id
    with torch.no_grad():
        features, deep = look(model, images)
    embedded = embedded.masked_scatter(mask[..., None], features.to(embedded.dtype))
    hidden: torch.Tensor = text(
        inputs_embeds=embedded,
        position_ids=positions,
        visual_pos_masks=mask,
        deepstack_visual_embeds=[layer.flatten(0, 1) for layer in deep],
        use_cache=False,
    ).last_hidden_state
    return hidden


def positions_of(token_ids: NDArray[np.int64], image_token: int) -> NDArray[np.int64]:
    """Positions as Qwen3-VL counts them, [3, T]: text goes on by one, an image by its longer side."""
    positions = np.zeros((3, len(token_ids)), dtype=np.int64)
    side = GRID // MERGE
    index, now = 0, 0
    while index < len(token_ids):
        if token_ids[index] == image_token:
            positions[0, index : index + TOKENS] = now
            positions[1, index : index + TOKENS] = now + np.repeat(np.arange(side), side)
            positions[2, index : index + TOKENS] = now + np.tile(np.arange(side), side)
            index, now = index + TOKENS, now + side
        else:
            positions[:, index] = now
            index, now = index + 1, now + 1
    return positions
