"""A model folder and data as small as can be: Qwen2.5-VL's shape with random weights; eight rows and a tar of images.

    python examples/code_with_images/tiny.py FOLDER      # FOLDER/model and FOLDER/data

They stand for the real ones in a dry run and in smoke.py. The model has Qwen2.5-VL's files (config, processor, a
tokenizer with its control tokens, a chat template of its form) and 0.2 million weights.
"""

import io
import json
import random
import sys
import tarfile
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

HERE = Path(__file__).resolve().parent
SIDE, SMALL = 224, 20
ALONE = 5
QUARTER = (0, 0, 112, 112)
"""Where every small square is."""
COLOURS = {"red": (220, 30, 30), "blue": (40, 60, 220), "green": (30, 160, 60), "black": (0, 0, 0)}
CONTROL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""


def make_data(folder: Path) -> list[dict[str, Any]]:
    """train.jsonl (6 rows), test.jsonl (2) and images.tar, as CodeV has them; gives all rows. Every other row asks for
    something small, and one of the others (ALONE) has no environment, so that it is answered without tools."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    with tarfile.open(folder / "images.tar", "w") as tar:
        for number in range(8):
            asked, truth, picture = scene(number)
            held = io.BytesIO()
            picture.save(held, "png")
            entry = tarfile.TarInfo(f"{number}.png")
            entry.size = held.tell()
            held.seek(0)
            tar.addfile(entry, held)
            rows.append(
                {
                    "data_source": "thinklite" if number == ALONE else "IconQA" if number % 2 else "vstar",
                    "prompt": [{"role": "user", "content": f"<image>\n{asked}"}],
                    "images": [f"{number}.png"],
                    "images_from": "images.tar",
                    "ability": "math" if number == ALONE else "vl_agent",
                    "env_name": None if number == ALONE else "code",
                    "reward_model": {"style": "rule", "ground_truth": truth},
                    "extra_info": {"index": str(number), "split": "train", "question": asked, "answer": truth,
                                   "image_file_name": f"{number}.png"},
                }
            )  # fmt: skip
    for name, some in (("train", rows[:6]), ("test", rows[6:])):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in some), encoding="utf-8")
    return rows


def scene(number: int) -> tuple[str, str, Image.Image]:
    """(question, answer, picture)."""
    chance = random.Random(number)
    picture = Image.effect_noise((SIDE, SIDE), 24).convert("RGB")
    draw, colour = ImageDraw.Draw(picture), list(COLOURS)[number // 2]
    if number % 2:
        for index in range(number // 2 + 1):
            draw.ellipse((20 + 50 * index, 80, 60 + 50 * index, 120), fill=COLOURS["blue"])
        return "How many discs are there?", str(number // 2 + 1), picture
    left, upper = chance.randrange(10, 90), chance.randrange(10, 90)
    draw.rectangle((left, upper, left + SMALL, upper + SMALL), fill=COLOURS[colour])
    return "What colour is the small square?", colour, picture


def make_model(folder: Path, words: str) -> None:
    """A folder as Qwen2.5-VL-7B-Instruct's, its tokenizer trained on `words`."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = _tokenizer(words)
    tokenizer.save_pretrained(folder)
    ids = dict(zip(CONTROL, tokenizer.convert_tokens_to_ids(list(CONTROL)), strict=True))
    image = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
        "min_pixels": 28 * 28, "max_pixels": 84 * 84,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(image), encoding="utf-8")
    (folder / "processor_config.json").write_text('{"processor_class": "Qwen2_5_VLProcessor"}', encoding="utf-8")
    config = Qwen2_5_VLConfig(
        text_config={
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": 4096, "vocab_size": len(tokenizer),
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "tie_word_embeddings": True, "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"],
            "bos_token_id": None,
        },
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
            "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1], "spatial_merge_size": 2,
        },
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"], tie_word_embeddings=True,
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"], dtype="float32",
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)


def _tokenizer(words: str) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator([words] * 2, trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet))
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.chat_template = TEMPLATE
    return made


def make(folder: Path, words: str = "") -> tuple[Path, Path]:
    """(the model's folder, the data's); what is there already stays."""
    model, data = folder / "model", folder / "data"
    if not (data / "images.tar").exists():
        make_data(data)
    if not (model / "config.json").exists():
        make_model(model, (HERE / "system_prompt.txt").read_text(encoding="utf-8") + words)
    return model, data


if __name__ == "__main__":
    for path in make(Path(sys.argv[1] if len(sys.argv) > 1 else "tiny")):
        print(path)
