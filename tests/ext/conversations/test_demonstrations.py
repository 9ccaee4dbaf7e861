"""Rows that cannot be learned, what is left out of the loss, and a run from a file on."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from chat_rows import ANSWER, CALL, MESSAGES, QUESTION, TOOL, asked, learned, read, write_lines
from PIL import Image
from public_templates import save_tokenizer

from turnwise import configure
from turnwise.chat.tokenizer import Tokenizer
from turnwise.commands.cli import main
from turnwise.engines.rendering import make_renderer, renderer_of
from turnwise.errors import DataError
from turnwise.storage.trajectories.files import read_trajectories
from turnwise.training.endpoint_episodes import Student

THANKS = "You are welcome.<|im_end|>"


def calling(arguments: Any, **reply: Any) -> list[dict[str, Any]]:
    call = {"id": "c2", "function": {"name": "weather", "arguments": arguments}}
    asking = {"role": "assistant", "content": None, "tool_calls": [call]}
    return [asking, {"role": "tool", "tool_call_id": "c2", "content": "?", **reply}]


def test_refused_rows_are_counted_by_reason_with_the_first_place(tmp_path: Path, student: Student) -> None:
    good = {"messages": [*QUESTION, *ANSWER], "source": "me"}
    rows = [
        good,
        {"messages": QUESTION},
        {"messages": [*QUESTION, {"role": "robot", "content": "5"}]},
        {"messages": [*QUESTION, *calling("{"), *ANSWER], "tools": [TOOL]},
        {"messages": [*QUESTION, *ANSWER, *ANSWER]},
        {"messages": [*QUESTION, *ANSWER, {"role": "tool", "content": "5"}, *ANSWER]},
        {"messages": [*QUESTION, {"role": "assistant", "content": "5<|im_end|>6"}]},
        {"messages": [*QUESTION, {"role": "assistant", "content": [{"type": "image", "image": "data:,"}]}]},
        {"messages": [{"role": "user", "content": "a" * 9000}, *ANSWER]},
        {"messages": [{"role": "robot", "content": "5"}]},
        {"messages": [*QUESTION, {**ANSWER[0], "mood": "good"}]},
        {"messages": [*QUESTION, {**ANSWER[0], "weight": 0}]},
        {"prompt": "2 + 3?", "completion": "5"},
    ]
    notes: list[str] = []
    read_in = read(asked([write_lines(tmp_path / "a.jsonl", rows)]), student, notes)
    assert (read_in.read, len(read_in.used)) == (13, 2)
    reasons = list(read_in.dropped)
    assert read_in.dropped[reasons[1]] == 2 and "unknown role 'robot'" in reasons[1]
    assert reasons[0] == "messages: no message of the assistant's to learn (first: a.jsonl row 1)"
    for reason, part in zip(
        reasons[2:],
        (
            "messages[].tool_calls[].function.arguments: not valid JSON",
            "two messages of the assistant's follow each other",
            "a tool's reply comes after a message without a call",
            "spells a control token",
            "reads text only",
            "longer than the model's context",
            "every message of the assistant's has weight 0",
            "messages: missing; the row has prompt, completion",
        ),
        strict=True,
    ):
        assert part in reason
    assert sum(read_in.dropped.values()) == 11
    assert notes == [
        "a.jsonl: 13 rows, 2 of them used; read as messages of OpenAI, Hugging Face and verl",
        "not read: messages[].mood, source",
    ]
    with pytest.raises(DataError, match="none of 1 conversations is left to learn from: 1 messages: no message"):
        read(asked([write_lines(tmp_path / "b.jsonl", rows[1:2])]), student)


def test_weights_and_the_last_turn_decide_what_is_learned(tmp_path: Path, student: Student) -> None:
    weighed = [*MESSAGES[:4], {**MESSAGES[4], "weight": 0}, *MESSAGES[5:]]
    file = write_lines(tmp_path / "a.jsonl", [{"messages": weighed, "tools": [TOOL]}])
    every = read(asked([file]), student)
    assert [text[:11] for text in learned(every, student)] == ["<tool_call>", THANKS[:11]]
    last = read(asked([file], "conversations.last_turn_only=true"), student)
    assert learned(last, student) == [THANKS]
    assert last.used[0].segments[0].token_ids.tolist() == every.used[0].segments[0].token_ids.tolist()


@pytest.mark.parametrize(
    "failing",
    [
        calling({}),
        calling({"city": "Oslo"}, status="error"),
        calling({"city": "Oslo"}, is_error=True),
        [{"role": "assistant", "tool_calls": [{"function": {"name": "wether", "arguments": {}}}]},
         {"role": "tool", "content": "unknown"}],
        [{"role": "assistant", "content": '<tool_call>\n{"name": "weather"\n</tool_call>'},
         {"role": "user", "content": "What?"}],
    ],
)  # fmt: skip
def test_turns_with_failed_calls_are_left_out_of_the_loss(
    failing: list[dict[str, Any]], tmp_path: Path, student: Student
) -> None:
    row = {"messages": [*MESSAGES[:2], *failing, *MESSAGES[2:5]], "tools": [TOOL]}
    file = write_lines(tmp_path / "a.jsonl", [row])
    assert len(learned(read(asked([file]), student), student)) == 3
    texts = learned(read(asked([file], "conversations.leave_out_failed_calls=true"), student), student)
    assert [json.dumps(CALL) in texts[0], texts[1:]] == [True, ["4 degrees.<|im_end|>"]]


def test_rows_without_tools_may_be_shown_those_of_the_task(tmp_path: Path, student: Student) -> None:
    file = write_lines(tmp_path / "a.jsonl", [{"messages": [*QUESTION, *ANSWER]}])
    for tools, is_shown in (("none", False), ("rollout", True)):
        config = asked([file], f"conversations.tools={tools}", "rollout.tools=[calculate]")
        text = student.renderer.tokenizer.decode(read(config, student).used[0].segments[0].token_ids)
        assert ('"calculate"' in text) is is_shown


def test_a_dry_run_marks_what_is_learned_and_a_run_keeps_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "a.jsonl", [{"messages": MESSAGES, "tools": [TOOL]}, {"messages": QUESTION}])
    command = ["sft", "conversations.files=[a.jsonl]", "sft.steps=1", "sft.warmup=1", "engine.threads=1", "run=taught"]
    assert main([*command, "--dry-run", "--json"]) == 0
    out = capsys.readouterr().out
    assert "«<|im_end|>»" in out and "How warm is it in Oslo?" in out and "nothing was written" in out
    (row,) = json.loads(out.splitlines()[-1])["first"]
    learned = [text for text, mask in zip(*row["segments"][0].values(), strict=True) if mask]
    assert "".join(learned).endswith("You are welcome.<|im_end|>")
    assert list(tmp_path.iterdir()) == [tmp_path / "a.jsonl"]
    write_lines(tmp_path / "b.jsonl", [{"messages": [*QUESTION, *ANSWER]}])
    assert main([*command, "conversations.eval_files=[b.jsonl]", "--json"]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out.splitlines()[-1])
    assert (report["trajectories"], report["used"], report["steps"]) == (2, 1, 1)
    before, after = report["heldout_losses"]
    logged = [json.loads(line) for line in (tmp_path / "runs" / "taught" / "metrics.jsonl").read_text().splitlines()]
    assert before > 0 and [line["sft/heldout_loss"] for line in logged] == [after] != [before]
    assert "no message of the assistant's to learn (first: a.jsonl row 1)" in printed.out.replace("\n", " ")
    kept = read_trajectories(tmp_path / "runs" / "taught" / "trajectories" / "step_000000.parquet")
    assert [message.role for message in kept[0].messages] == [entry["role"] for entry in MESSAGES]
    assert (tmp_path / "runs" / "taught" / "policy" / "model.safetensors").is_file()


def test_images_stand_in_what_is_read(tmp_path: Path) -> None:
    config = configure("model.path=tiny_vision")
    seeing = Student(make_renderer(config), 1 << 20, 4096)
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    asking = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Which colour?"}]
    rows = [
        {"messages": [{"role": "user", "content": asking}, *ANSWER]},
        {"messages": [{"role": "user", "content": "<image>Which colour?"}, *ANSWER], "images": [url]},
    ]
    read_in = read(asked([write_lines(tmp_path / "a.jsonl", rows)], "model.path=tiny_vision"), seeing)
    first, second = (trajectory.segments[0] for trajectory in read_in.used)
    assert first.token_ids.tolist() == second.token_ids.tolist() and len(first.media) == len(second.media) == 1
    assert seeing.renderer.tokenizer.decode(first.token_ids[first.loss_mask]).startswith("5")


def test_a_template_that_drops_thoughts_makes_two_sequences(tmp_path: Path) -> None:
    folder = save_tokenizer("qwen3", tmp_path / "tokenizer")
    thinking = Student(renderer_of(configure(), Tokenizer(folder)), 1 << 20, 1 << 20)
    thought = [*QUESTION, {**ANSWER[0], "reasoning_content": "two and three"}, *QUESTION, *ANSWER]
    read_in = read(asked([write_lines(tmp_path / "a.jsonl", [{"messages": thought}])]), thinking)
    texts = [thinking.renderer.tokenizer.decode(ledger.token_ids) for ledger in read_in.used[0].segments]
    assert ["two and three" in text for text in texts] == [True, False]
    empty = "<think>\n\n</think>\n\n5<|im_end|>"
    assert learned(read_in, thinking) == ["<think>\ntwo and three\n</think>\n\n5<|im_end|>", empty]
