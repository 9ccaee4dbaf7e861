"""The layouts of others: one conversation in each of them gives the same tokens, of which the same are learned."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_rows import ANSWER, CALL, MESSAGES, QUESTION, TOOL, asked, learned, read, write_lines

from turnwise.data.loader import load_samples
from turnwise.errors import DataError
from turnwise.training.endpoint_episodes import Student

CALL_TEXT = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>'
SHAREGPT = [
    {"from": "human", "value": "How warm is it in Oslo?"},
    {"from": "function_call", "value": json.dumps(CALL)},
    {"from": "observation", "value": "4 degrees"},
    {"from": "gpt", "value": "4 degrees."},
    {"from": "human", "value": "Thanks."},
    {"from": "gpt", "value": "You are welcome."},
]
AS_TEXT = {
    **MESSAGES[2],
    "tool_calls": [{"id": "c1", "function": {**CALL, "arguments": json.dumps(CALL["arguments"])}}],
}
ROWS: dict[str, dict[str, Any]] = {
    "OpenAI": {"messages": [*MESSAGES[:2], AS_TEXT, *MESSAGES[3:]], "tools": [TOOL]},
    "messages under conversations": {"conversations": MESSAGES, "tools": [TOOL]},
    "ShareGPT": {"conversations": SHAREGPT, "system": "Be brief.", "tools": json.dumps([TOOL["function"]])},
    "TRL": {"prompt": MESSAGES[:2], "completion": MESSAGES[2:], "tools": [TOOL]},
    "calls in the text": {
        "messages": [
            *MESSAGES[:2],
            {"role": "assistant", "content": CALL_TEXT.removesuffix("<|im_end|>")},
            *MESSAGES[3:],
        ],
        "tools": [TOOL],
    },
}


@pytest.mark.parametrize("layout", ROWS)
def test_one_conversation_in_every_layout_gives_the_same_tokens(layout: str, tmp_path: Path, student: Student) -> None:
    expected = read(asked([write_lines(tmp_path / "a.jsonl", [{"messages": MESSAGES, "tools": [TOOL]}])]), student)
    rows = write_lines(tmp_path / "b.jsonl", [ROWS[layout]])
    other = read(asked([rows]), student)
    (ledger,), (same,) = expected.used[0].segments, other.used[0].segments
    assert ledger.token_ids.tolist() == same.token_ids.tolist()
    assert ledger.loss_mask.tolist() == same.loss_mask.tolist()
    assert learned(other, student) == [CALL_TEXT, "4 degrees.<|im_end|>", "You are welcome.<|im_end|>"]


def test_texts_are_a_question_and_an_answer(tmp_path: Path, student: Student) -> None:
    rows = [
        {"messages": [*QUESTION, *ANSWER]},
        {"prompt": "What is 2 + 3?", "completion": "5"},
        {"instruction": "What is 2 + 3?", "input": "", "output": "5"},
    ]
    files = [write_lines(tmp_path / f"{number}.jsonl", [row]) for number, row in enumerate(rows)]
    read_in = read(asked(files), student)
    tokens = [trajectory.segments[0].token_ids.tolist() for trajectory in read_in.used]
    assert tokens == [tokens[0]] * 3 and learned(read_in, student) == ["5<|im_end|>"]


def test_the_formats_of_files(tmp_path: Path, student: Student) -> None:
    import datasets

    as_text = {"messages": [*MESSAGES[:2], AS_TEXT, *MESSAGES[3:]], "tools": json.dumps([TOOL])}
    (tmp_path / "a.json").write_text(json.dumps([as_text]))
    table = pa.Table.from_pylist([as_text, {"messages": [*QUESTION, *ANSWER], "tools": None}])
    pq.write_table(table, tmp_path / "b.parquet")  # as verl has them: every message has the members of all
    datasets.Dataset.from_list([as_text]).save_to_disk(tmp_path / "c")
    read_in = read(asked([tmp_path / "a.json", tmp_path / "b.parquet", tmp_path / "c"]), student)
    assert read_in.read == 4 and read_in.dropped == {}
    first, second, third, fourth = [trajectory.segments[0].token_ids.tolist() for trajectory in read_in.used]
    assert first == second == fourth != third


def test_an_unknown_layout_is_answered_with_the_nearest(tmp_path: Path, student: Student) -> None:
    for row, text in (
        ({"mesages": []}, "a.jsonl: the columns mesages are no layout of conversations: did you mean 'messages'?"),
        (
            {"text": "a"},
            "Known are messages (messages of OpenAI, Hugging Face and verl); conversations (ShareGPT); prompt",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "pairs of answers (chosen, rejected) teach a preference"),
    ):
        with pytest.raises(DataError) as refused:
            read(asked([write_lines(tmp_path / "a.jsonl", [row])]), student)
        assert text in str(refused.value)


def test_rows_of_every_layout_are_prompts_of_reinforcement_learning(tmp_path: Path) -> None:
    prompts = {}
    for number, (name, row) in enumerate(ROWS.items()):
        rows = write_lines(tmp_path / f"{number}.jsonl", [row])
        (sample,) = load_samples([rows], prompt_key="prompt", default_source="talks")
        assert sample.info.keys() <= {"messages", "conversations", "completion", "tools"}
        prompts[name] = [(message.role, message.text) for message in sample.prompt]
    expected = [(entry["role"], entry["content"]) for entry in MESSAGES[:2]]
    assert prompts == dict.fromkeys(ROWS, expected)
    row = {"prompt": [*MESSAGES[:2], AS_TEXT, MESSAGES[3]], "completion": MESSAGES[4:5]}
    (sample,) = load_samples(
        [write_lines(tmp_path / "calls.jsonl", [row])], prompt_key="prompt", default_source="talks"
    )
    assert sample.prompt[2].tool_calls[0].arguments == CALL["arguments"] and len(sample.prompt) == 4
