"""Small tokenizers with templates that behave like the families in use, and a conversation to try them with."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from turnwise.chat.formats import hermes
from turnwise.chat.renderer import HistoryRewritten, Renderer
from turnwise.types import Completion, FinishReason, Ledger, Message, Origin, Role, ToolCall

TEMPLATES = Path(__file__).parent / "templates"
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
WORDS = Regex(r"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CORPUS = (
    "The quick brown fox asks a tool for help.\n\nUser: what is six times seven?\nAssistant: it is forty-two.",
    '{"name": "probe", "arguments": {"x": "1"}}\n</tool_response>\n</tool_call>... !!! ??? ;;; ---- "," "}}" :: (())',
    "system user assistant tool ipython model\n\n\n  indented\t\ttabs \n \n trailing   ",
    "naïve café Größe 東京 привет 🙂🙂 e\u0301",
) * 4
SCHEMA = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
    },
}


@dataclass(frozen=True)
class Family:
    """A template with the tokenizer it belongs to."""

    name: str
    control: tuple[str, ...] = CHATML
    eos: str = "<|im_end|>"
    bos: str | None = None
    system: bool = True
    tools: bool = True
    """Whether a tool may reply to plain text."""
    users: bool = True
    """Whether the template only appends when a user replies."""
    lead: str = ""
    """What the policy writes before its words, where the template writes it too."""
    flagged: bool = True
    """Whether the control tokens are flagged as special."""
    strips: tuple[str, ...] = ()
    """Control tokens that swallow the white space after them."""
    nfc: bool = False
    metaspace: bool = False

    def build(self, folder: Path) -> Path:
        """Train the tokenizer and save it with the template."""
        backend = _metaspace() if self.metaspace else _byte_level()
        if self.nfc:
            backend.normalizer = normalizers.NFC()
        ends = [token for token in (self.eos, self.bos) if token]
        for token in self.control:
            special = self.flagged or token in ends
            backend.add_tokens([AddedToken(token, special=special, normalized=False, rstrip=token in self.strips)])
        backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
        wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=self.eos, bos_token=self.bos)
        wrapped.chat_template = (TEMPLATES / f"{self.name}.jinja").read_text(encoding="utf-8").removesuffix("\n")
        wrapped.save_pretrained(folder)
        return folder


def _byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(WORDS, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def _metaspace() -> Backend:
    """Spaces are letters, the first word gets one of its own, and unknown characters fall back to bytes."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=240, show_progress=False))
    learned = json.loads(backend.to_str())["model"]
    vocabulary = learned["vocab"] | {f"<0x{byte:02X}>": len(learned["vocab"]) + byte for byte in range(256)}
    backend.model = models.BPE(vocabulary, [tuple(pair) for pair in learned["merges"]], byte_fallback=True)
    return backend


FAMILIES = {
    family.name: family
    for family in (
        Family("qwen25"),
        Family("qwen3", users=False, nfc=True),
        Family(
            "deepseek_r1",
            (
                "<|bos|>",
                "<|eos|>",
                "<|User|>",
                "<|Assistant|>",
                "<|outputs|>",
                "<|/outputs|>",
                "<|output|>",
                "<|/output|>",
            ),
            "<|eos|>",
            "<|bos|>",
        ),
        Family(
            "llama3",
            ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
            "<|end_of_text|>",
            "<|begin_of_text|>",
        ),
        Family(
            "mistral",
            ("<s>", "</s>", "[INST]", "[/INST]", "[TOOLS]", "[/TOOLS]", "[CALLS]", "[RESULTS]", "[/RESULTS]"),
            "</s>",
            "<s>",
            tools=False,
            lead=" ",
        ),
        Family(
            "gemma",
            ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
            "<eos>",
            "<bos>",
            system=False,
            tools=False,
        ),
        Family(
            "phi",
            ("<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"),
            "<|endoftext|>",
            strips=("<|end|>", "<|user|>", "<|assistant|>", "<|tool|>"),
        ),
        Family("plain", ("<|endoftext|>",), "<|endoftext|>"),
        Family("counted"),
        Family("dated"),
        Family("unclosed", eos="<|endoftext|>"),
        Family("json_tools", CHATML[:2], flagged=False),
        Family("deaf", tools=False),
        Family("rounds"),
        Family(
            "glm",
            ("[gMASK]", "<sop>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
            "<|endoftext|>",
        ),
        Family("harmony", ("<|start|>", "<|message|>", "<|end|>", "<|return|>"), "<|return|>"),
        Family("both_tags"),
        Family("no_tags"),
        Family(
            "llama2", ("<s>", "</s>", "[INST]", "[/INST]"), "</s>", "<s>", system=False, tools=False, metaspace=True
        ),
    )
}
APPENDING = ("qwen25", "llama3", "mistral", "gemma", "phi", "unclosed", "json_tools", "rounds", "glm")
"""Families whose template only appends, whoever replies, and whose control tokens keep turns apart."""


def completion(renderer: Renderer, text: str, end: int | None) -> Completion:
    """A completion as a sampler writes it; `end` None: cut short, or ended by a stop string."""
    ids = (*renderer.tokenizer.encode(text, after="").ids, *([] if end is None else [end]))
    reason = FinishReason.STOP if end is not None else FinishReason.LENGTH
    return Completion.of(ids, [-0.5] * len(ids), reason, version=0)


def call_text(count: int) -> str:
    return "\n".join(hermes.render_call(ToolCall("", "probe", {"x": str(number)})) for number in range(count))


@dataclass
class Talk:
    """One conversation, driven as a speaker drives it."""

    renderer: Renderer
    prompt: list[Message]
    tools: Sequence[dict[str, Any]] = (SCHEMA,)
    messages: list[Message] = field(default_factory=list)
    segments: list[Ledger] = field(default_factory=list)
    last: Completion | None = None
    turn: int = -1

    def __post_init__(self) -> None:
        self.messages = list(self.prompt)
        self._open()

    @property
    def ledger(self) -> Ledger:
        return self.segments[-1]

    def end_before(self, role: Role | None) -> int:
        """The end token the template puts when this role replies, None: when nobody does."""
        template = self.renderer.template
        closing = (template.closing if role is None else template.follow.get(role, template.closing)).lstrip()
        fitting = [text for text in template.stop_texts if closing.startswith(text)]
        return self.renderer.tokenizer.added_ids[fitting[0]] if fitting else min(self.renderer.stop_ids)

    def say(self, text: str, end: int | None) -> Message:
        self.turn += 1
        self.last = completion(self.renderer, text, end)
        message = self.renderer.read(self.last, self.turn, self.ledger.token_ids)
        self.ledger.append(self.last.token_ids, Origin.POLICY, self.turn, self.last.logprobs, self.last.versions)
        self.messages.append(message)
        return message

    def append_replies(self, *replies: Message) -> None:
        assert self.last is not None
        try:
            spans = self.renderer.extend(self.messages[:-1], self.messages[-1], self.last, replies, self.tools)
        except HistoryRewritten:
            self.messages.extend(replies)
            self._open()
            return
        for span in spans:
            self.ledger.append(span.ids, span.origin, self.turn)
        self.messages.extend(replies)

    def answer_and_hear_user(self, words: str, reply: str) -> None:
        self.say(words, self.end_before(Role.USER))
        self.append_replies(Message(Role.USER, reply))

    def call_and_hear_tools(self, words: str, replies: Sequence[str]) -> None:
        message = self.say(words + call_text(len(replies)), self.end_before(Role.TOOL))
        calls = zip(message.tool_calls, replies, strict=True)
        self.append_replies(*(Message(Role.TOOL, text, tool_call_id=call.id, name=call.name) for call, text in calls))

    def text_of(self, origin: Origin, turn: int | None = None) -> str:
        """What an origin wrote, all of it."""
        found = [ids for whose, when, ids in self.ledger.spans() if whose is origin and turn in (None, when)]
        return "".join(self.renderer.tokenizer.decode(ids) for ids in found)

    def _open(self) -> None:
        ledger = Ledger()
        ledger.append(self.renderer.open(self.messages, self.tools), Origin.PROMPT, max(self.turn, 0))
        self.segments.append(ledger)
