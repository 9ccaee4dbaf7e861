"""Which tool-call format a model writes, from the words of its chat template and its special tokens."""

from collections.abc import Iterable
from dataclasses import dataclass

DEFAULT = "hermes"
ALIASES = {
    "gpt-oss": "gpt_oss", "harmony": "gpt_oss", "openai": "gpt_oss",
    "gemma4": "gemma",
    "kimi_k2": "kimi",
    "deepseek_v3": "deepseek", "deepseek_r1": "deepseek", "deepseek_v31": "deepseek", "deepseek_v32": "deepseek_v4",
    "glm45": "glm", "glm47": "glm",
    "minimax_m2": "minimax",
    "seed_oss": "seed",
    "llama3": "llama3_json",
    "qwen3_xml": "qwen3_coder",
}  # fmt: skip
"""What verl and the inference engines call our formats."""
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gpt_oss", ("<|channel|>", "<|call|>")),
    ("gemma", ("<|tool_call>",)),
    ("kimi", ("<|tool_calls_section_begin|>",)),
    ("deepseek_v4", ("｜DSML｜",)),
    ("deepseek", ("<｜tool▁calls▁begin｜>",)),
    ("minimax", ("<minimax:tool_call>",)),
    ("seed", ("<seed:tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("glm", ("<tool_call>", "<arg_key>")),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("hermes", ("<tool_call>",)),
    ("llama3_json", ("<|start_header_id|>", '"parameters"')),
)
"""What a template says that writes such calls: all of the words. The first that fits is taken, so those whose words
others use too come last."""
_TOKENS = (*_SIGNS[:9], ("llama3_json", ("<|python_tag|>",)))
"""Tokens that only one format has."""


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """A tool-call format and why it is the one."""

    name: str
    reason: str
    """Empty when the config names it."""
    is_known: bool = True
    """Whether anything said so."""


def choose_format(named: str | None, templates: Iterable[str], tokens: Iterable[str]) -> FormatChoice:
    """The configured format; null: the one that the template, else the tokens, speak of."""
    if named is not None:
        return FormatChoice(ALIASES.get(named, named), "")
    text, known = "\n".join(templates), set(tokens)
    for name, words in _SIGNS:
        if all(word in text for word in words):
            return FormatChoice(name, f"the chat template writes {' and '.join(words)}")
    for name, words in _TOKENS:
        if all(word in known for word in words):
            return FormatChoice(name, f"the tokenizer has {' and '.join(words)}")
    return FormatChoice(
        DEFAULT, "neither the chat template nor the tokenizer tells; set chat.tool_format if it is another", False
    )
