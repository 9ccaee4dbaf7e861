"""What a model folder holds beside weights: tokenizer, chat template, image processor."""

import re
from pathlib import Path

from network import MERGE, PATCH, VIEW
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessorPil

import turnwise.ext.tinylook.model
from turnwise.ext.tinylook.language import VOCABULARY

CONTROL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
IMAGE = "<|image_pad|>"
ROLES = ("system", "user", "assistant", "tool", "tools: ", "look")
PARAMETERS = ("box", "turn", "contrast")
TEMPLATE = Path(turnwise.ext.tinylook.model.__file__).parent / "chat_template.jinja"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The task's pieces as whole tokens, matched the longest first; bytes for any other text."""
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = [piece for piece in (*ROLES, *VOCABULARY, *PARAMETERS) if len(piece) > 1]
    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(_as_bytes(spelled, piece) for piece in pieces)]
    words = {word: number for number, word in enumerate(dict.fromkeys((*CONTROL, *vocabulary)))}
    bpe = Tokenizer(models.BPE(vocab=words, merges=[], ignore_merges=True))
    pattern = "|".join(re.escape(piece) for piece in sorted(pieces, key=len, reverse=True))
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), spelled])
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=2048
    )


def _as_bytes(spelled: pre_tokenizers.ByteLevel, text: str) -> str:
    """A text in the letters that stand for its bytes."""
    return "".join(part for part, _ in spelled.pre_tokenize_str(text))


def make_processor() -> Qwen2VLImageProcessorPil:
    """Every image becomes one of 64x64 pixels, which takes 16 tokens."""
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=1,
        size={"shortest_edge": VIEW * VIEW, "longest_edge": VIEW * VIEW},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )


def write_folder(folder: Path) -> PreTrainedTokenizerFast:
    """Everything but config and weights; gives the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    tokenizer.save_pretrained(folder)
    make_processor().save_pretrained(folder)
    return tokenizer
