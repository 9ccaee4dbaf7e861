"""Tiny random vision-language models of many families, as folders: config, weights, tokenizer and image processor."""

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import vision_processors as made
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

TEXT = {
    "vocab_size": made.VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
    "pad_token_id": 256, "bos_token_id": 258, "eos_token_id": 257,
}  # fmt: skip
FIRST = 256 + len(made.CHATML)
"""The number of the first token of a family's own."""
TOWER = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
CLIP = TOWER | {"model_type": "clip_vision_model", "projection_dim": 16}
SIGLIP = TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False}
PATCHES = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
    "spatial_merge_size": 2,
}  # fmt: skip
SQUARE = {"size": {"height": 16, "width": 16}}
GRID = {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32], [48, 16]]}
QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN_SHOWN = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_IDS = {
    "vision_start_token_id": FIRST, "vision_end_token_id": FIRST + 1, "image_token_id": FIRST + 2,
    "video_token_id": FIRST + 3,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """What its folder says; the tokens of its own are numbered from `FIRST` on."""

    model_type: str
    config: dict[str, Any]
    tokens: tuple[str, ...]
    shown: str
    """What its template writes for an image."""
    processor: str
    image: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)
    """Tokens that its processor asks the tokenizer for."""


def rotary(*section: int) -> dict[str, Any]:
    """Positions in time, height and width."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(section)}}


def text(model_type: str | None = None, **changed: Any) -> dict[str, Any]:
    """The decoder's config."""
    return TEXT | ({"model_type": model_type} if model_type else {}) | changed


def _qwen(kind: str, processor: str, read: dict[str, Any], tower: dict[str, Any], **image: Any) -> Family:
    config = QWEN_IDS | {"text_config": read, "vision_config": tower}
    return Family(kind, config, QWEN_TOKENS, QWEN_SHOWN, processor, made.QWEN_IMAGE | image)


def _glm(kind: str, read: dict[str, Any]) -> Family:
    marks = (
        "<|begin_of_image|>",
        "<|end_of_image|>",
        "<|image|>",
        "<|video|>",
        "<|begin_of_video|>",
        "<|end_of_video|>",
    )
    names = ("image_start", "image_end", "image", "video", "video_start", "video_end")
    ids = {f"{name}_token_id": FIRST + number for number, name in enumerate(names)}
    config = ids | {"text_config": read, "vision_config": PATCHES | {"image_size": 16}}
    image = {"image_processor_type": "Glm4vImageProcessor", "patch_size": 4, "temporal_patch_size": 2, "merge_size": 2}
    sizes = {"size": {"shortest_edge": 256, "longest_edge": 4608}}
    return Family(kind, config, marks, "".join(marks[one] for one in (0, 2, 1)), "Glm4vProcessor", image | sizes)


def _idefics(kind: str, name: str) -> Family:
    rows = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
    tokens = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *rows)
    config = {"image_token_id": FIRST, "scale_factor": 2, "text_config": text("llama"), "vision_config": TOWER}
    sizes = {"size": {"longest_edge": 48}, "max_image_size": {"longest_edge": 16}, "do_image_splitting": True}
    image = {"image_processor_type": f"{name}ImageProcessor"} | sizes
    return Family(kind, config, tokens, "<image>", f"{name}Processor", image, {"image_seq_len": 4})


_llava = partial(Family, tokens=("<image>", "<video>"), shown="<image>\n")
SEEING = {
    "qwen2_vl": _qwen(
        "qwen2_vl", "Qwen2VLProcessor", text(**rotary(1, 1, 2)),
        {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4},
    ),
    "qwen2_5_vl, 3 x 3 patches a token": _qwen(
        "qwen2_5_vl", "Qwen2_5_VLProcessor", text(**rotary(2, 1, 1)),
        PATCHES | {"depth": 3, "patch_size": 2, "spatial_merge_size": 3, "window_size": 24, "fullatt_block_indexes": [1]},
        patch_size=2, merge_size=3,
    ),
    "qwen3_vl, tied, features into three layers": _qwen(
        "qwen3_vl", "Qwen3VLProcessor", text(num_hidden_layers=4, head_dim=8, tie_word_embeddings=True, **rotary(2, 1, 1)),
        PATCHES | {"depth": 4, "deepstack_visual_indexes": [0, 1, 3], "num_position_embeddings": 36},
    ),
    "qwen3_vl_moe": _qwen(
        "qwen3_vl_moe", "Qwen3VLProcessor",
        text(head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, **rotary(2, 1, 1)),
        PATCHES | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "qwen3_5, recurrent": _qwen(
        "qwen3_5", "Qwen3VLProcessor",
        text(
            head_dim=8, layer_types=["linear_attention", "full_attention"], linear_num_value_heads=4,
            linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
            rope_parameters={
                "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0
            },
        ),
        PATCHES | {"num_position_embeddings": 16},
    ),
    "exaone4_5": _qwen(
        "exaone4_5", "Exaone4_5_Processor",
        text("exaone4", sliding_window=64, sliding_window_pattern=2, head_dim=8),
        PATCHES | {"window_size": 16, "fullatt_block_indexes": [1], "num_key_value_heads": 2},
    ),
    "video_llama_3": _qwen(
        "video_llama_3", "VideoLlama3Processor", text("qwen2"), TOWER,
        image_processor_type="VideoLlama3ImageProcessor", temporal_patch_size=1,
    ),
    "glm4v": _glm("glm4v", text(**rotary(1, 1, 2))),
    "glm4v_moe": _glm(
        "glm4v_moe",
        text(
            head_dim=8, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1, topk_group=1,
            first_k_dense_replace=1, **rotary(1, 1, 0),
        ),
    ),
    "paddleocr_vl": Family(
        "paddleocr_vl", QWEN_IDS | {"text_config": text(head_dim=8, **rotary(1, 1, 2)), "vision_config": TOWER},
        ("<|IMAGE_START|>", "<|IMAGE_END|>", "<|IMAGE_PLACEHOLDER|>", "<|video_pad|>"),
        "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>", "PaddleOCRVLProcessor",
        made.QWEN_IMAGE | {"image_processor_type": "PaddleOCRVLImageProcessor", "temporal_patch_size": 1},
        named={"image_token": "<|IMAGE_PLACEHOLDER|>"},
    ),
    "idefics3, in parts": _idefics("idefics3", "Idefics3"),
    "smolvlm, in parts": _idefics("smolvlm", "SmolVLM"),
    "llava": _llava(
        "llava", {"image_token_index": FIRST, "text_config": text("llama"), "vision_config": CLIP},
        processor="LlavaProcessor",
        image={"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 16}, "crop_size": SQUARE["size"]},
        settings={"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava_onevision": _llava(
        "llava_onevision",
        GRID | {
            "image_token_index": FIRST, "video_token_index": FIRST + 1, "text_config": text("qwen2"),
            "vision_config": SIGLIP,
        },
        processor="LlavaOnevisionProcessor", image=SQUARE | GRID | {"image_processor_type": "LlavaOnevisionImageProcessor"},
        settings={"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    ),
    "internvl": Family(
        "internvl",
        {
            "image_token_id": FIRST + 2, "image_seq_length": 4, "text_config": text("qwen2"),
            "vision_config": TOWER | {"image_size": [16, 16], "patch_size": [4, 4]},
        },
        ("<img>", "</img>", "<IMG_CONTEXT>", "<video>"), "<IMG_CONTEXT>\n", "InternVLProcessor",
        SQUARE | {"image_processor_type": "GotOcr2ImageProcessor", "crop_to_patches": True, "max_patches": 4},
        {"image_seq_length": 4},
        {
            "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
    "aya_vision, whose template writes another token": Family(
        "aya_vision",
        {
            "image_token_index": FIRST + 3, "downsample_factor": 2, "vision_config": SIGLIP,
            "text_config": text("cohere2", head_dim=8, sliding_window=64, layer_types=["sliding_attention"] * 2),
        },
        ("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "TILE", "TILE_GLOBAL"),
        "<image>", "AyaVisionProcessor",
        SQUARE | {"image_processor_type": "GotOcr2ImageProcessor", "crop_to_patches": True, "max_patches": 4},
        {"patch_size": 4, "img_size": 16, "downsample_factor": 2},
    ),
    "gemma4, causal": Family(
        "gemma4",
        {
            "image_token_id": FIRST, "boi_token_id": FIRST + 1, "eoi_token_id": FIRST + 2, "video_token_id": FIRST + 3,
            "audio_token_id": FIRST + 4, "boa_token_id": FIRST + 5, "audio_config": None,
            "text_config": text(
                head_dim=8, global_head_dim=16, sliding_window=64, layer_types=["sliding_attention", "full_attention"],
                hidden_size_per_layer_input=0,
            ),
            "vision_config": TOWER | {
                "num_key_value_heads": 2, "head_dim": 8, "pooling_kernel_size": 2, "position_embedding_size": 512,
            },
        },
        ("<|image|>", "<|image>", "<image|>", "<|video|>", "<|audio|>", "<|audio>", "<audio|>"),
        "<|image|>", "Gemma4Processor",
        {
            "image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "max_soft_tokens": 70,
            "pooling_kernel_size": 2,
        },
        named={
            "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>", "audio_token": "<|audio|>",
            "boa_token": "<|audio>", "eoa_token": "<audio|>",
        },
    ),
    "deepseek_vl": Family(
        "deepseek_vl", {"image_token_id": FIRST, "text_config": text("llama"), "vision_config": SIGLIP},
        ("<image_placeholder>",), "<image_placeholder>", "DeepseekVLProcessor",
        SQUARE | {"image_processor_type": "DeepseekVLImageProcessor", "min_size": 4}, {"num_image_tokens": 16},
        {"image_token": "<image_placeholder>"},
    ),
}  # fmt: skip
UNFIT = {
    "gemma3": Family(
        "gemma3",
        {
            "image_token_index": FIRST, "boi_token_index": FIRST + 1, "eoi_token_index": FIRST + 2,
            "mm_tokens_per_image": 4, "text_config": text(head_dim=8, sliding_window=64), "vision_config": SIGLIP,
        },
        ("<image_soft_token>", "<start_of_image>", "<end_of_image>"), "<start_of_image>", "Gemma3Processor",
        SQUARE | {"image_processor_type": "Gemma3ImageProcessor"}, {"image_seq_length": 4},
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    ),
    "paligemma": Family(
        "paligemma", {}, ("<image>",), "<image>", "PaliGemmaProcessor",
        SQUARE | {"image_processor_type": "SiglipImageProcessor", "image_seq_length": 16},
    ),
    "idefics2": Family(
        "idefics2", {}, ("<image>", "<fake_token_around_image>", "<end_of_utterance>"), "<image>", "Idefics2Processor",
        {"image_processor_type": "Idefics2ImageProcessor", "size": {"longest_edge": 16, "shortest_edge": 12}},
        {"image_seq_len": 4},
    ),
    "mllama": Family(
        "mllama", {}, ("<|image|>",), "<|image|>", "MllamaProcessor",
        SQUARE | {"image_processor_type": "MllamaImageProcessor", "max_image_tiles": 2},
    ),
    "minicpmv4_6": Family(
        "minicpmv4_6", {}, ("<|image_pad|>",), "<|image_pad|>", "MiniCPMV4_6Processor",
        {"image_processor_type": "MiniCPMV4_6ImageProcessor"},
    ),
}  # fmt: skip
"""With processors whose images have no fixed block of tokens, or that want parts we do not have."""


def write(family: Family, folder: Path, template: str = made.QWEN_TEMPLATE) -> Path:
    """Tokenizer, template and processor, without a model."""
    control, shown = (*made.CHATML, *family.tokens), template.replace(QWEN_SHOWN, family.shown)
    kind = made.Kind(control, "<|im_end|>", shown, "", family.image, family.settings)
    tokenizer = made.tokenizer(kind, bos_token="<|endoftext|>", **({"extra_special_tokens": family.named}))
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(family.image), encoding="utf-8")
    settings = {"processor_class": family.processor, **family.settings}
    (folder / "processor_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def build(family: Family) -> PreTrainedModel:
    """The model in eager attention; every call gives the same weights."""
    config = AutoConfig.for_model(family.model_type, **family.config)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.25 if parameter.dim() > 1 else 1.0)
    return model
