"""One conversation, and what a student would learn of it."""

import json
from pathlib import Path
from typing import Any

from turnwise import configure
from turnwise.config import Config
from turnwise.training.demonstrations import Demonstrations, gather
from turnwise.training.endpoint_episodes import Student

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL: dict[str, Any] = {"name": "weather", "arguments": {"city": "Oslo"}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How warm is it in Oslo?"},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": CALL}]},
    {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "4 degrees"},
    {"role": "assistant", "content": "4 degrees."},
    {"role": "user", "content": "Thanks."},
    {"role": "assistant", "content": "You are welcome."},
]
QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]
ANSWER = [{"role": "assistant", "content": "5"}]


def asked(files: list[Path], *overrides: str) -> Config:
    return configure(f"conversations.files={[str(file) for file in files]}", "rollout.tools=[]", *overrides)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(config: Config, student: Student, notes: list[str] | None = None) -> Demonstrations:
    demonstrations = gather(config, student, None, [].append if notes is None else notes.append)
    assert demonstrations is not None
    return demonstrations


def learned(demonstrations: Demonstrations, student: Student, number: int = 0) -> list[str]:
    """The runs of tokens that are learned, as text."""
    texts: list[str] = []
    for ledger in demonstrations.used[number].segments:
        before = False
        for token, is_learned in zip(ledger.token_ids.tolist(), ledger.loss_mask.tolist(), strict=True):
            if is_learned:
                texts = [*texts[:-1], texts[-1] + [token]] if before else [*texts, [token]]
            before = is_learned
    return [student.renderer.tokenizer.decode(ids) for ids in texts]
