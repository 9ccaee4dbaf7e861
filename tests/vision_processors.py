"""Tiny processors of models that see, saved as their folders have them: Qwen2.5-VL, Qwen3-VL, SmolVLM, LLaVA-NeXT.

Tokenizers are bytes (`VOCABULARY` of them with the control tokens, `ids` says which is which); templates are like the
models' own. What a model must have to go with one is in `SIZES`.
"""

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
QWEN = (*CHATML, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SMOL = (
    "<|im_start|>", "<end_of_utterance>", "<image>", "<fake_token_around_image>", "<global-img>",
    *(f"<row_{row}_col_{col}>" for row in range(1, 5) for col in range(1, 5)),
)  # fmt: skip
LLAVA = (*CHATML, "<image>")

QWEN_TEMPLATE = """\
{%- macro show(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}{%- for part in content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.role == 'tool' %}<tool_response>
{{ show(message.content) }}
</tool_response>{% else %}{{ show(message.content) }}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
SMOL_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
LLAVA_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ '\n' + part['text'] }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Kind:
    """One family: its control tokens, its template and the settings of its processor."""

    control: tuple[str, ...]
    eos: str
    template: str
    image_token: str
    image: dict[str, Any]
    """preprocessor_config.json"""
    settings: dict[str, Any]
    """processor_config.json"""


QWEN_IMAGE = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "temporal_patch_size": 2, "merge_size": 2,
    "min_pixels": 16 * 16, "max_pixels": 48 * 48,
}  # fmt: skip
KINDS = {
    "qwen2_5_vl": Kind(
        QWEN, "<|im_end|>", QWEN_TEMPLATE, "<|image_pad|>", QWEN_IMAGE, {"processor_class": "Qwen2_5_VLProcessor"}
    ),
    "qwen3_vl": Kind(
        QWEN, "<|im_end|>", QWEN_TEMPLATE, "<|image_pad|>", QWEN_IMAGE, {"processor_class": "Qwen3VLProcessor"}
    ),
    "smolvlm": Kind(
        SMOL,
        "<end_of_utterance>",
        SMOL_TEMPLATE,
        "<image>",
        {
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 32},
            "max_image_size": {"longest_edge": 16},
        },
        {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},  # (16 / 4) ** 2 patches, 2 x 2 of them a token
    ),
    "llava_next": Kind(
        LLAVA,
        "<|im_end|>",
        LLAVA_TEMPLATE,
        "<image>",
        {
            "image_processor_type": "LlavaNextImageProcessor",
            "size": {"shortest_edge": 16},
            "crop_size": {"height": 16, "width": 16},
            "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]],
        },
        {
            "processor_class": "LlavaNextProcessor",
            "patch_size": 4,
            "vision_feature_select_strategy": "full",
            "num_additional_image_tokens": 0,
        },
    ),
}
SIZES = {
    "qwen2_5_vl": {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2},
    "qwen3_vl": {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2},
    "smolvlm": {"image_size": 16, "patch_size": 4, "scale_factor": 2},
    "llava_next": {
        "image_size": 16,
        "patch_size": 4,
        "vision_feature_select_strategy": "full",
        "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]],
    },
}
"""What the model's config must say; a LLaVA tower without a class token (SigLIP)."""
VOCABULARY = 320
"""Rows of embeddings that are enough for every kind."""


def build(name: str, folder: Path) -> Path:
    """Save the tokenizer, the template and the processor of a kind; a model's config.json and weights go beside."""
    kind = KINDS[name]
    tokenizer(kind).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(kind.image), encoding="utf-8")
    (folder / "processor_config.json").write_text(json.dumps(kind.settings), encoding="utf-8")
    return folder


def tokenizer(kind: Kind, **more: Any) -> PreTrainedTokenizerFast:
    """One token a byte, then the control tokens; `more` is for the library's own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in kind.control])
    backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    ends = {"eos_token": kind.eos, "pad_token": kind.control[0]}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, **ends, **more)
    wrapped.chat_template = kind.template
    return wrapped


def ids(name: str) -> dict[str, int]:
    """The control tokens of a kind by their texts."""
    return {text: 256 + number for number, text in enumerate((*KINDS[name].control, *TAGS))}


def picture(width: int = 32, height: int = 32, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Noise: no two pixels alike, so that nothing that is turned or swapped goes unseen."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(noise).convert(mode)


def encoded(image: Image.Image, form: str = "png", **options: Any) -> bytes:
    """The bytes of a file."""
    held = io.BytesIO()
    image.save(held, form, **options)
    return held.getvalue()
