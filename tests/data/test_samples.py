"""Rows to samples: verl's meaning of the columns, the null traps, and refusals that name the field."""

import base64
import dataclasses
import datetime
import decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from turnwise.data.rows import Row, RowError, read_rows
from turnwise.data.sample_to_row import to_values
from turnwise.data.samples import misspelt, to_sample
from turnwise.types import Image, InteractionSpec, Message, Role, Sample, Text, ToolCall

PNG = b"\x89PNG\r\n\x1a\n....."
MISFIT = "images: {} images for {} places (<image> or image parts) in prompt"
PNG_URL = "data:image/png;base64," + base64.b64encode(PNG).decode()


def row(**columns: Any) -> Row:
    values: dict[str, Any] = {"data_source": "s", "prompt": [{"role": "user", "content": "hi"}]}
    return Row(Path("data/train.parquet"), 17, values | columns)


def sample(**columns: Any) -> Sample:
    return to_sample(row(**columns), prompt_key="prompt")


def refusal(**columns: Any) -> str:
    with pytest.raises(RowError) as caught:
        sample(**columns)
    assert caught.value.row.number == 17
    return str(caught.value).removeprefix("train.parquet row 17: ")


def test_every_column_finds_its_place() -> None:
    kwargs = {"search": {"create_kwargs": {"k": 1}, "execute_kwargs": {"deep": {"er": [1, None]}}}}
    extra = {
        "index": 3,
        "split": "train",
        "question": "?",
        "need_tools_kwargs": True,
        "tools_kwargs": kwargs,
        "tool_selection": ["search"],
        "interaction_kwargs": {"name": "gsm8k", "query": "q", "ground_truth": "42"},
    }
    got = sample(
        prompt=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
        ability="math",
        reward_model={"style": "rule", "ground_truth": {"target": ["42"]}},
        extra_info=extra,
        agent_name="tool_agent",
        uid="u1",
        metadata={"a": 1},
    )
    assert got == Sample(
        id="train.parquet:17",
        prompt=(Message(Role.SYSTEM, "be brief"), Message(Role.USER, "hi")),
        data_source="s",
        ground_truth={"target": ["42"]},
        agent="tool_agent",
        tools=("search",),
        tools_kwargs=kwargs,
        interaction=InteractionSpec("gsm8k", {"query": "q", "ground_truth": "42"}),
        info={
            "ability": "math",
            "uid": "u1",
            "metadata": {"a": 1},
            "extra_info": extra,
            "reward_model": {"style": "rule"},
        },
    )


def test_a_bare_row_leaves_everything_to_the_plan() -> None:
    bare = Sample("train.parquet:17", (Message(Role.USER, "hi"),), "s")
    assert sample(prompt=[{"role": "user", "content": "hi"}]) == bare
    assert sample(prompt="hi") == dataclasses.replace(bare, info={"plain_prompt": True})


def test_the_prompt_may_stand_in_another_column() -> None:
    values = {"data_source": "s", "question": "hi", "prompt": 3}
    got = to_sample(Row(Path("a.jsonl"), 0, values), prompt_key="question")
    assert got.prompt == (Message(Role.USER, "hi"),)
    assert got.info == {"prompt": 3, "plain_prompt": True}


def test_tool_messages_keep_name_and_call_id() -> None:
    message = {"role": "tool", "content": "4", "name": "calculate", "tool_call_id": "c1"}
    assert sample(prompt=[message]).prompt == (Message(Role.TOOL, "4", name="calculate", tool_call_id="c1"),)


def test_arrow_null_traps(tmp_path: Path) -> None:
    """Rows of different shape come back from parquet null-filled; each must read as it was before."""
    rows = [
        {"tools_kwargs": {"a": {"create_kwargs": {"x": 1}}}, "interaction_kwargs": {"name": "n", "q": "?"}},
        {"tools_kwargs": {"b": {"create_kwargs": {"y": "2"}, "execute_kwargs": {"z": [1]}}}},
        {"interaction_kwargs": {"hint": "h"}, "tool_selection": ["a"]},
        {},
    ]
    table = [{"data_source": "s", "prompt": "hi", "extra_info": {"index": n} | extra} for n, extra in enumerate(rows)]
    path = tmp_path / "t.parquet"
    pq.write_table(pa.Table.from_pylist(table), path)
    assert next(iter(read_rows(path))).values["extra_info"]["tools_kwargs"]["b"] is None  # the trap is really there
    got = [to_sample(each, prompt_key="prompt") for each in read_rows(path)]
    assert [s.tools_kwargs for s in got] == [rows[0]["tools_kwargs"], rows[1]["tools_kwargs"], {}, {}]
    assert [s.interaction for s in got] == [InteractionSpec("n", {"q": "?"}), None, None, None]
    assert [s.info.get("interaction_kwargs") for s in got] == [None, None, {"hint": "h"}, None]
    assert [s.tools for s in got] == [None, None, ("a",), None]
    assert got[3].info == {"extra_info": {"index": 3}, "plain_prompt": True}


def test_null_absent_and_empty_mean_the_same() -> None:
    nulls = {"ability": None, "reward_model": None, "extra_info": {}, "agent_name": None, "images": None, "uid": None}
    assert sample(**nulls) == sample()
    assert sample(extra_info={"tools_kwargs": {"a": None, "b": {}, "c": {"create_kwargs": None}}}) == sample()


def test_choosing_no_tool_is_a_choice() -> None:
    assert sample(extra_info={"tool_selection": []}).tools == ()
    assert sample(extra_info={"tools_kwargs": {"a": {"create_kwargs": {"x": 1}}}}).tools is None


def test_kwargs_in_columns_of_their_own() -> None:
    kwargs = {"a": {"create_kwargs": {"x": 1}}}
    got = sample(tools_kwargs=kwargs, interaction_kwargs={"name": "n"})
    assert (got.tools_kwargs, got.interaction, got.info) == (kwargs, InteractionSpec("n"), {})
    assert sample(tools_kwargs=kwargs, extra_info={"tools_kwargs": kwargs}).tools_kwargs == kwargs
    assert refusal(tools_kwargs=kwargs, extra_info={"tools_kwargs": {"a": {"x": 2}}}) == (
        "tools_kwargs: differs from extra_info.tools_kwargs; keep one of them"
    )


def test_a_sample_shares_nothing_with_its_row_nor_with_itself() -> None:
    extra = {"tools_kwargs": {"a": {"create_kwargs": {"x": [1]}}}}
    got = sample(extra_info=extra)
    got.info["extra_info"]["tools_kwargs"]["a"]["create_kwargs"]["x"].append(2)
    assert got.tools_kwargs == extra["tools_kwargs"] == {"a": {"create_kwargs": {"x": [1]}}}


def test_numpy_and_arrow_values_become_plain() -> None:
    prompt = np.array([{"role": "user", "content": "hi"}], dtype=object)
    grid, half = np.array([[1, 2]]), np.float32(0.5)
    extra = {"index": np.int64(3), "need_tools_kwargs": np.bool_(False), "grid": grid, "f": half}
    got = sample(prompt=prompt, extra_info=extra, when=datetime.date(2024, 1, 2), cost=decimal.Decimal("1.10"))
    assert got.info["extra_info"] == {"index": 3, "need_tools_kwargs": False, "grid": [[1, 2]], "f": 0.5}
    assert {type(value) for value in got.info["extra_info"].values()} == {int, bool, list, float}
    assert (got.info["when"], got.info["cost"]) == ("2024-01-02", "1.10")


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"prompt": None}, "prompt: missing: valid: data_source."),
        ({"prompt": 3}, "prompt: expected a list of messages or text, got a number"),
        ({"prompt": {"role": "user"}}, "prompt: expected a list of messages or text, got an object"),
        ({"prompt": []}, "prompt: empty"),
        ({"prompt": [[]]}, "prompt[0]: expected an object with role and content, got a list"),
        ({"prompt": [None]}, "prompt[0]: expected an object with role and content, got nothing"),
        ({"prompt": [{"role": "user"}]}, "prompt[0].content: missing"),
        ({"prompt": [{"content": "x"}]}, "prompt[0].role: missing"),
        (
            {"prompt": [{"role": "user", "content": 5}]},
            "prompt[0].content: expected text or a list of parts, got a number",
        ),
        (
            {"prompt": [{"role": "user", "content": ["x"]}]},
            "prompt[0].content[0]: expected an object with a type, got text",
        ),
        ({"data_source": None}, "data_source: missing; data.default_source=NAME sets it for rows without one"),
        ({"data_source": ["a"]}, "data_source: expected text, got a list"),
        ({"data_source": " "}, "data_source: empty"),
        ({"agent_name": float("nan")}, "agent_name: expected text, got a number"),
        ({"reward_model": "rule"}, "reward_model: expected an object, got text"),
        ({"reward_model": {"style": 1}}, "reward_model.style: expected text, got a number"),
        ({"extra_info": [1]}, "extra_info: expected an object, got a list"),
        ({"extra_info": {"index": [1]}}, "extra_info.index: expected a whole number or text, got a list"),
        ({"extra_info": {"index": True}}, "extra_info.index: expected a whole number or text, got true or false"),
        ({"extra_info": {"split": 1}}, "extra_info.split: expected text, got a number"),
        (
            {"extra_info": {"need_tools_kwargs": "yes"}},
            "extra_info.need_tools_kwargs: expected true or false, got text",
        ),
        ({"extra_info": {"tool_selection": "a"}}, "extra_info.tool_selection: expected a list of tool names, got text"),
        ({"extra_info": {"tool_selection": ["a", None]}}, "extra_info.tool_selection[1]: missing"),
        ({"extra_info": {"tool_selection": ["a", "a"]}}, "extra_info.tool_selection: a tool appears twice"),
        ({"extra_info": {"tools_kwargs": {"a": 3}}}, "extra_info.tools_kwargs.a: expected an object, got a number"),
        (
            {"tools_kwargs": {"a": {"create_kwargs": []}}},
            "tools_kwargs.a.create_kwargs: expected an object, got a list",
        ),
        ({"extra_info": {"interaction_kwargs": "x"}}, "extra_info.interaction_kwargs: expected an object, got text"),
        ({"interaction_kwargs": {"name": 3}}, "interaction_kwargs.name: expected text, got a number"),
        ({"x": {"y": ["a", "\ud800"]}}, "x.y[1]: not valid Unicode: a lone surrogate at character 0"),
        ({"x": {1: 2}}, "x: its keys must be text, one is a number"),
        ({"x": object()}, "x: values of type object cannot be used"),
    ],
)
def test_refusals_name_the_field(columns: dict[str, Any], text: str) -> None:
    assert refusal(**columns) == text


def test_refusals_propose_the_nearest_name() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "asistant", "content": "b"}]
    assert refusal(prompt=messages) == "prompt[1].role: unknown role 'asistant': did you mean 'assistant'?"
    assert "did you mean 'content'?" in refusal(prompt=[{"role": "user", "contents": "a"}])
    assert "did you mean 'promt'?" in refusal(prompt=None, promt="x")
    called = {"role": "assistant", "tool_calls": [{"id": "1"}]}
    assert refusal(prompt=[called]) == "prompt[0].tool_calls[0].function.name: missing"
    assert "a user message has none" in refusal(prompt=[{"role": "user", "content": "a", "reasoning_content": "b"}])
    broken = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
    assert "prompt[0].tool_calls[0].function.arguments: not valid JSON" in refusal(prompt=[broken])


def test_calls_of_earlier_turns_are_read_and_written_back() -> None:
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
        {"function": {"name": "f", "arguments": '{"x": null}'}},
    ]
    asking = {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": "hm"}
    prompt = [{"role": "user", "content": "a"}, asking, {"role": "tool", "tool_call_id": "c1", "content": "2"}]
    read = sample(prompt=prompt)
    assert read.prompt[1].tool_calls == (ToolCall("c1", "f", {"x": 1}), ToolCall("call_1", "f", {"x": None}))
    assert (read.prompt[1].text, read.prompt[1].reasoning, read.prompt[2].tool_call_id) == ("", "hm", "c1")
    assert sample(**to_values(read)).prompt == read.prompt


def test_deep_nesting_and_huge_values_are_answered_in_one_short_line() -> None:
    deep: Any = "x"
    for _ in range(500):
        deep = [deep]
    assert "nested deeper than 64 levels" in refusal(x=deep)
    assert len(refusal(prompt=[{"role": "r" * 10**6, "content": ""}])) < 300
    assert refusal(agent_name=10**5000) == "agent_name: expected text, got a number"
    assert sample(extra_info={"index": 10**5000}).info["extra_info"]["index"] == 10**5000


def test_images_take_the_places_of_their_markers() -> None:
    images = ["a.png", {"path": "b.png"}, {"bytes": PNG, "path": "ignored.png"}, PNG]
    got = sample(prompt="one <image> two <image><image>\n<image>", images=images)
    wanted = tuple(map(Image, ("a.png", "b.png", PNG_URL, PNG_URL)))
    assert got.images == wanted
    a, b, c, d = wanted
    assert got.prompt[0].content == (Text("one "), a, Text(" two "), b, c, Text("\n"), d)


def test_image_parts_bring_their_own_source_or_take_the_next() -> None:
    parts = [
        {"type": "text", "text": "look <image>", "image": None},
        {"type": "image", "text": None},
        {"type": "image", "image": {"bytes": PNG}},
        {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
    ]
    got = sample(prompt=[{"role": "user", "content": parts}], images=["a.png"])
    assert got.prompt[0].content == (Text("look <image>"), *map(Image, ("a.png", PNG_URL, "https://x/y.png")))
    assert got.images == tuple(map(Image, ("a.png", PNG_URL, "https://x/y.png")))


def test_without_an_images_column_a_marker_is_text() -> None:
    assert sample(prompt="what does <image> mean?").prompt[0].content == "what does <image> mean?"


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"prompt": "<image>", "images": ["a", "b"]}, MISFIT.format(2, 1)),
        ({"prompt": "<image>", "images": []}, MISFIT.format(0, 1)),
        ({"images": ["a"]}, MISFIT.format(1, 0)),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, MISFIT.format(0, 1)),
        (
            {"prompt": "<image>", "images": 3},
            "images: expected a path, bytes or an object with one of them, got a number",
        ),
        (
            {"prompt": "<image>", "images": [3]},
            "images[0]: expected a path, bytes or an object with one of them, got a number",
        ),
        (
            {"prompt": "<image>", "images": [{"bytes": b"junk"}]},
            "images[0].bytes: these bytes are not a PNG, JPEG, GIF, WebP or BMP image",
        ),
        (
            {"prompt": "<image>", "images": [{"x": 1}]},
            "images[0]: an image needs one of bytes, path, image, url, image_url",
        ),
        ({"prompt": "<image>", "images": [""]}, "images[0]: empty"),
    ],
)
def test_images_that_do_not_fit(columns: dict[str, Any], text: str) -> None:
    assert refusal(**columns) == text


def test_other_part_types_are_refused() -> None:
    assert "unknown part type 'video'" in refusal(prompt=[{"role": "user", "content": [{"type": "video"}]}])


_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["role", "content", "type", "text", "image", "name", "a", "create_kwargs", "index", "bytes"]
            )
            | st.text(max_size=3),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)
_ANY_ROW = st.dictionaries(
    st.sampled_from(["prompt", "data_source", "images", "extra_info", "reward_model", "tools_kwargs", "agent_name"]),
    _ANY,
)


@given(values=_ANY_ROW, readable=st.booleans())
@example(values={}, readable=True)
@settings(max_examples=300, deadline=None)
def test_any_row_is_a_sample_or_a_row_error(values: dict[str, Any], readable: bool) -> None:
    if readable:  # else hardly a row is a sample
        values |= {"prompt": [{"role": "user", "content": "2+2?"}], "data_source": "sums"}
    try:
        got = to_sample(Row(Path("a.jsonl"), 0, values), prompt_key="prompt")
    except RowError as error:
        assert str(error).startswith("a.jsonl row 0: ")
    else:
        assert got.prompt
        assert got.data_source
    assert values.keys() - {"prompt", "data_source"} or not readable or got.prompt[0].text == "2+2?"


@pytest.mark.parametrize(
    ("columns", "field"),
    [
        ({"agent_nmae": "tool_agent"}, "agent_nmae"),
        ({"agent_nmae": "tool_agent", "agent_name": None}, "agent_nmae"),
        ({"extra_info": {"tool_kwargs": {}}}, "extra_info.tool_kwargs"),
        ({"reward_model": {"ground_truths": "1"}}, "reward_model.ground_truths"),
        ({"tool_selection": ["a"]}, "tool_selection"),
    ],
)
def test_slips_in_names_are_found(columns: dict[str, Any], field: str) -> None:
    assert [name for name, _ in misspelt(row(**columns).values, prompt_key="prompt")] == [field]


def test_other_names_are_left_alone() -> None:
    columns = {"uuid": 1, "source": 1, "metadata": 1, "image_sizes": 1, "agent_names": None}
    values = row(**columns, extra_info={"index": 0, "indices": [1], "tools": []}, reward_model={"style": "rule"}).values
    assert list(misspelt(values, prompt_key="prompt")) == []
