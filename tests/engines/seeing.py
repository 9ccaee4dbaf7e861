"""Tiny random vision-language models of transformers and images as their own processors prepare them, for tests."""

import io
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from architectures import SMALL
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    SmolVLMImageProcessorPil,
)
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from turnwise.engines.model.attention import packed
from turnwise.engines.model.image_features import Stretch, joined_features, joined_positions
from turnwise.engines.model.policy_model import ModelInputs, PolicyModel
from turnwise.engines.model.recurrence import Recurrence
from turnwise.ledger import Media, MediaSpan
from turnwise.system.image_bytes import digest_of

IMAGE, FAKE, GLOBAL, NEWLINE, ROWS = 90, 91, 92, 93, 40
"""Token ids: of an image, and of the marks that SmolVLM puts around parts of one."""
START, END = 94, 95
"""Around an image of Qwen."""
TEXT = {key: value for key, value in SMALL.items() if key != "initializer_range"} | {"max_position_embeddings": 512}
NAMED = {"image_token_id": IMAGE, "video_token_id": 89, "vision_start_token_id": START, "vision_end_token_id": END}
MROPE = {"rope_type": "default", "rope_theta": 10000.0}
KINDS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": NAMED
    | {
        "text_config": TEXT | {"rope_parameters": MROPE | {"mrope_section": [1, 1, 2]}},
        "vision_config": {
            "depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
            "patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1], "spatial_merge_size": 2,
        },
    },
    "qwen3_vl": NAMED
    | {
        "text_config": TEXT | {"head_dim": 8, "rope_parameters": MROPE | {"mrope_section": [2, 1, 1]}},
        "vision_config": {
            "depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
            "patch_size": 4, "spatial_merge_size": 2, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16,
        },
    },
    "smolvlm": {
        "image_token_id": IMAGE,
        "scale_factor": 2,
        "tie_word_embeddings": True,
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": {
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 16, "patch_size": 4, "initializer_range": 0.25,
        },
    },
    "llava_next": {
        "image_token_index": IMAGE,
        "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]],
        "vision_feature_layer": -1,
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": {
            "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": 16, "patch_size": 4, "projection_dim": 16,
        },
    },
}  # fmt: skip


def build(kind: str, **changed: Any) -> PreTrainedModel:
    """A tiny model of the family, in eager attention; every call gives the same weights."""
    config = AutoConfig.for_model(kind, **{**KINDS[kind], **changed})
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.25 if parameter.dim() > 1 else 1.0)
    return model


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Coloured noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def png(seed: int, width: int, height: int) -> bytes:
    """A picture as a file."""
    file = io.BytesIO()
    picture(seed, width, height).save(file, "PNG")
    return file.getvalue()


@cache
def prepared(kind: str, seed: int, width: int = 16, height: int = 16) -> Media:
    """A picture as the family's processor prepares it, and the tokens that its processor would write for it."""
    content = png(seed, width, height)
    block, arrays = PREPARE[kind](picture(seed, width, height))
    ids = np.array(block, dtype=np.int64)
    return Media(digest_of(content), content, ids, ids == IMAGE, arrays)


def _qwen(image: Image.Image) -> tuple[list[int], dict[str, Any]]:
    processor = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 4096})
    made = processor(images=[image], return_tensors="np")
    count = int(made["image_grid_thw"].prod()) // 4
    return [IMAGE] * count, {name: made[name] for name in ("pixel_values", "image_grid_thw")}


def _smolvlm(image: Image.Image) -> tuple[list[int], dict[str, Any]]:
    processor = SmolVLMImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    made = processor(images=[image], return_row_col_info=True, return_tensors="np")
    text = get_image_prompt_string(made["rows"][0][0], made["cols"][0][0], 4, "F", "I", "G")
    ids = {"F": FAKE, "I": IMAGE, "G": GLOBAL, "\n": NEWLINE}
    for row in range(1, 4):
        for column in range(1, 4):
            text = text.replace(f"<row_{row}_col_{column}>", chr(0x100 + 4 * row + column))
    block = [ids[mark] if mark in ids else ROWS + ord(mark) - 0x100 for mark in text]
    return block, {name: made[name] for name in ("pixel_values", "pixel_attention_mask")}


def _llava_next(image: Image.Image) -> tuple[list[int], dict[str, Any]]:
    words = Tokenizer(models.WordLevel({"<image>": IMAGE, "?": 0}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, additional_special_tokens=["<image>"])
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 16},
        crop_size={"height": 16, "width": 16},
        image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]],
    )
    processor = LlavaNextProcessor(
        images, tokenizer, patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    made = processor(text="<image>", images=[image], return_tensors="np")
    return made["input_ids"][0].tolist(), {name: made[name] for name in ("pixel_values", "image_sizes")}


PREPARE = {"qwen2_5_vl": _qwen, "qwen3_vl": _qwen, "smolvlm": _smolvlm, "llava_next": _llava_next}


@dataclass(frozen=True, slots=True)
class Shown:
    """A sequence with images in it."""

    ids: np.ndarray
    media: tuple[MediaSpan, ...]


def shown(kind: str, seed: int, *parts: int | tuple[int, int]) -> Shown:
    """Text and pictures by turns: a number is so many drawn tokens, a pair the width and height of a picture."""
    noise = np.random.default_rng(seed)
    ids: list[np.ndarray] = []
    spans: list[MediaSpan] = []
    for number, part in enumerate(parts):
        at = sum(map(len, ids))
        if isinstance(part, int):
            ids.append(noise.integers(3, 40, part))
        else:
            spans.append(MediaSpan(prepared(kind, 100 * seed + number, *part), at))
            ids.append(spans[-1].media.token_ids)
    return Shown(np.concatenate(ids), tuple(spans))


def plain_arrays(kind: str, media: tuple[MediaSpan, ...]) -> dict[str, torch.Tensor]:
    """The arrays of several images of one sequence as the family's own `forward` takes them."""
    given = {}
    for name in media[0].media.arrays if media else ():
        arrays = [span.media.arrays[name] for span in media]
        if kind == "smolvlm":  # one row of parts for the sequence
            given[name] = torch.from_numpy(np.concatenate(arrays, axis=1))
        elif kind == "llava_next" and name == "pixel_values":  # as many parts for each, of which only some count
            most = max(array.shape[1] for array in arrays)
            padded = [np.pad(a, [(0, 0), (0, most - a.shape[1]), *[(0, 0)] * 3]) for a in arrays]
            given[name] = torch.from_numpy(np.concatenate(padded))
        else:
            given[name] = torch.from_numpy(np.concatenate(arrays))
    return given


@torch.no_grad()
def plain_logits(kind: str, model: PreTrainedModel, sequence: Shown) -> torch.Tensor:
    """All that the family's own code does, with every image at once."""
    ids = torch.from_numpy(sequence.ids)[None]
    types = {"mm_token_type_ids": (ids == IMAGE).long()} if kind.startswith("qwen") and sequence.media else {}
    return model(input_ids=ids, use_cache=False, **plain_arrays(kind, sequence.media), **types).logits[0].float()


def logits(model: PolicyModel, *sequences: Shown) -> torch.Tensor:
    """Of our own model, with sequences packed into one pass."""
    stretches = [
        Stretch(
            list(zip(one.media, model.encode_images([span.media for span in one.media]), strict=True)), 0, len(one.ids)
        )
        for one in sequences
    ]
    inputs = ModelInputs(
        torch.from_numpy(np.concatenate([one.ids for one in sequences])),
        torch.from_numpy(joined_positions([model.positions(one.ids, one.media) for one in sequences])),
        joined_features(stretches, torch.device("cpu")),
        Recurrence(tuple(len(one.ids) for one in sequences)),
    )
    with torch.no_grad():
        return model.logits(model(inputs, packed([len(one.ids) for one in sequences])))
