"""What tool-call formats are called, and what the words of a chat template and the special tokens tell of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

DEFAULT = "hermes"
ALIASES = {
    "gpt-oss": "gpt_oss", "harmony": "gpt_oss", "openai": "gpt_oss",
    "gemma4": "gemma",
    "kimi_k2": "kimi",
    "deepseek_v3": "deepseek", "deepseek_r1": "deepseek", "deepseek_v31": "deepseek", "deepseek_v32": "deepseek_v4",
    "glm45": "glm", "glm47": "glm",
    "minimax_m2": "minimax",
    "phi4_mini_json": "phi4_mini",
    "llama4_pythonic": "pythonic", "llama4": "pythonic",
    "granite3": "granite",
    "hunyuan_a13b": "apriel",
    "seed_oss": "seed",
    "llama3": "llama3_json",
    "qwen3_xml": "qwen3_coder",
}  # fmt: skip
"""What inference engines and other trainers call our formats."""
ONE_TOOL = ("calculator", "code")
"""Formats whose calls are always of the same tool: no chat template writes them, a task teaches them."""
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gpt_oss", ("<|channel|>", "<|call|>")),
    ("gemma", ("<|tool_call>",)),
    ("kimi", ("<|tool_calls_section_begin|>",)),
    ("deepseek_v4", ("｜DSML｜",)),
    ("deepseek", ("<｜tool▁calls▁begin｜>",)),
    ("minimax", ("<minimax:tool_call>",)),
    ("minimax_m3", ("]<]minimax[>[",)),
    ("seed", ("<seed:tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("phi4_mini", ("functools[",)),
    ("phi4_mini", ("<|/tool_call|>",)),
    ("granite", ("<|tool_call|>",)),
    ("apriel", ("<tool_calls>[",)),
    ("minimax_m1", ("<tool_calls>",)),
    ("glm", ("<tool_call>", "<arg_key>")),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ("<|start_header_id|>", '"parameters"')),
)
"""What a template says that speaks of such calls: all of the words. The first that fits is taken, so those whose words
others use too come last."""
_TOKENS = (*(sign for sign in _SIGNS if sign[0] not in ("apriel", "minimax_m1", "hermes", "pythonic", "llama3_json")),
           ("llama3_json", ("<|python_tag|>",)))  # fmt: skip
"""Tokens that only one format has."""


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """A tool-call format and why it is the one."""

    name: str
    reason: str
    """Empty when the config names it."""
    problem: str | None = None
    """Why calls of the model cannot be read; conversations without tools need none."""
    is_known: bool = True
    """Whether anything said so."""


def choose_format(named: str | None) -> FormatChoice:
    """The format of this name, ours or another system's; null: the one of most models."""
    return FormatChoice(DEFAULT if named is None else ALIASES.get(named, named), "")


def by_signs(templates: Iterable[str], tokens: Iterable[str]) -> FormatChoice:
    """The format that a chat template which writes no calls speaks of, else one that only the special tokens name."""
    text, vocabulary = "\n".join(templates), set(tokens)
    for name, words in _SIGNS:
        if all(word in text for word in words):
            return FormatChoice(name, f"the chat template mentions {' and '.join(words)} but writes no calls itself")
    for name, words in _TOKENS:
        if all(word in vocabulary for word in words):
            return FormatChoice(name, f"the tokenizer has {' and '.join(words)}; the chat template writes no calls")
    reason = "the chat template neither writes nor mentions calls; set chat.tool_format if this is wrong"
    return FormatChoice(DEFAULT, reason, is_known=False)


def sign_order(template: str) -> Sequence[str]:
    """Formats whose words are known, first those that a template mentions: the choice where several read its calls."""
    likely = [name for name, words in _SIGNS if all(word in template for word in words)]
    return list(dict.fromkeys([*likely, *(name for name, _ in reversed(_SIGNS))]))  # the rest: what is common first
