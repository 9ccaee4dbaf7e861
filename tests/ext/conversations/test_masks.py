"""Which tokens are learned, compared token by token with transformers' own mask of the templates that mark them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chat_rows import ANSWER, MESSAGES, QUESTION, TOOL, asked, read, write_lines
from public_templates import save_tokenizer

import turnwise.chat
from turnwise import configure
from turnwise.chat.tokenizer import Tokenizer
from turnwise.engines.model.sources import find_model
from turnwise.engines.rendering import renderer_of
from turnwise.training.endpoint_episodes import Student

OURS = "chatml_hermes"
MARKED = ("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_5_nothink", "lfm2_v2", "glm4moe")
"""Templates for which TRL has one that marks what the assistant says: with the newlines around it."""
TALKS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "tools": (MESSAGES[:5], [TOOL]),
    "plain": ([*QUESTION, *ANSWER], []),
    "thought": ([*QUESTION, {**ANSWER[0], "reasoning_content": "two and three"}], []),
    "long": (MESSAGES, [TOOL]),
}
SCRIPT = """
import json, sys
from transformers import PreTrainedTokenizerFast
for line in sys.stdin:
    folder, messages, tools = json.loads(line)
    hf = PreTrainedTokenizerFast.from_pretrained(folder)
    out = hf.apply_chat_template(
        messages, tools=tools or None, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    print(json.dumps([list(out["input_ids"]), list(out["assistant_masks"])]))
"""
"""In a process of its own: here, templates are compiled so that they are bounded, which knows no marks."""
CASES = [
    *((name, talk) for name in (OURS, *MARKED) for talk in ("tools", "plain") if (name, talk) != ("glm4moe", "tools")),
    (OURS, "long"),
    ("qwen3", "thought"),
]
"""TRL's template for GLM ends a message by whether its calls stand apart; ours has them in the text, as rollouts do."""


def build(name: str, folder: Path) -> Path:
    """The tokenizer with a template that marks what the assistant says."""
    if name != OURS:
        return save_tokenizer(f"{name}_training", folder)
    tiny = find_model("tiny", False).folder
    folder.mkdir()
    for file in tiny.glob("*token*.json"):
        shutil.copy(file, folder)
    source = (Path(turnwise.chat.__file__).parent / "templates" / f"{OURS}.jinja").read_text()
    for text, marked in (
        (
            'assistant\n{{ text(message.content or "") }}',
            'assistant\n{% generation %}{{ text(message.content or "") }}',
        ),
        ("{%- endfor -%}\n<|im_end|>\n{% else", '{%- endfor -%}\n<|im_end|>{% endgeneration %}{{ "\\n" }}{% else'),
    ):
        assert source.count(text) == 1
        source = source.replace(text, marked)
    (folder / "chat_template.jinja").write_text(source)
    return folder


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[Path, list[int], list[int]]]:
    """The folder, token ids and mask of every case, as transformers has them."""
    folders = {name: build(name, tmp_path_factory.mktemp("tokenizers") / name) for name in (OURS, *MARKED)}
    lines = "\n".join(json.dumps([str(folders[name]), *TALKS[talk]]) for name, talk in CASES)
    done = subprocess.run([sys.executable, "-c", SCRIPT], input=lines, capture_output=True, text=True, check=True)
    outcomes = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]
    return {case: (folders[case[0]], *outcome) for case, outcome in zip(CASES, outcomes, strict=True)}


@pytest.mark.parametrize(("name", "talk"), CASES)
def test_tokens_and_mask_are_those_of_transformers(
    name: str, talk: str, peers: dict[tuple[str, str], tuple[Path, list[int], list[int]]], tmp_path: Path
) -> None:
    folder, ids, mask = peers[name, talk]
    messages, tools = TALKS[talk]
    student = Student(renderer_of(configure(), Tokenizer(folder)), 1 << 20, 1 << 20)
    row = {"messages": messages, **({"tools": tools} if tools else {})}
    demonstrations = read(asked([write_lines(tmp_path / "a.jsonl", [row])]), student)
    (ledger,) = demonstrations.used[0].segments
    length, learned = len(ledger), ledger.loss_mask.astype(int).tolist()
    assert ledger.token_ids.tolist() == ids[:length]
    decode = student.renderer.tokenizer.decode
    assert decode(ids[length:]).strip() == "" and sum(learned) > 0
    if name == OURS:
        assert learned == mask[:length] and not any(mask[length:])
    else:  # a header's newline, or the empty thought in it, is no word of the assistant's, nor is what follows its end
        assert all(theirs for theirs, own in zip(mask, learned, strict=False) if own)
        others = [token for token, theirs, own in zip(ids, mask, learned, strict=False) if theirs and not own]
        assert {decode([token]).strip() for token in others} <= {"", "<think>", "</think>"}
