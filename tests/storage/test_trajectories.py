"""Trajectory files give back what was put in."""

import json
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from turnwise.errors import StorageError
from turnwise.ledger import TOKEN_TRAINING, TokenTrainingData, VersionRun
from turnwise.storage.trajectories.files import (
    read_rows,
    read_texts,
    read_trajectories,
    write_jsonl,
    write_trajectories,
)
from turnwise.storage.trajectories.rows import from_row, to_row
from turnwise.storage.trajectories.schema import SCHEMA, SCHEMAS, VERSION_KEY
from turnwise.storage.transcript import transcript
from turnwise.types import (
    Branch,
    CallRecord,
    CallStatus,
    EnvironmentRecord,
    EpisodeFacts,
    FinishReason,
    Image,
    InteractionSpec,
    Ledger,
    Message,
    Origin,
    Remark,
    RenderCheck,
    Role,
    Sample,
    StopReason,
    Text,
    ToolCall,
    Trajectory,
    Turn,
)

numbers = st.floats(allow_nan=False)
counts = st.integers(0, 2**31 - 1)
short = st.text(max_size=8)
texts = st.none() | short
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | short | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(short, inner, max_size=3),
    max_leaves=5,
)
objects = st.dictionaries(short, json_values, max_size=2)
calls = st.builds(ToolCall, short, short, objects, texts)
parts = st.lists(st.builds(Text, short) | st.builds(Image, short), max_size=2).map(tuple)
messages = st.builds(
    Message, st.sampled_from(Role), short | parts, st.lists(calls, max_size=2).map(tuple), texts, texts, texts, texts
)
records = st.builds(
    CallRecord, calls, st.sampled_from(CallStatus), numbers, st.booleans(), st.none() | numbers, objects
)
turns = st.builds(
    Turn,
    counts, messages, st.sampled_from(FinishReason), counts, counts, counts, counts, counts,
    st.lists(records, max_size=2), st.lists(messages, max_size=2), st.none() | numbers, numbers, numbers,
)  # fmt: skip
singles = st.floats(allow_nan=True, width=32)


@st.composite
def ledgers(draw: st.DrawFn) -> Ledger:
    ledger = Ledger()
    for origin in draw(st.lists(st.sampled_from(Origin), max_size=4)):
        ids, turn = draw(st.lists(counts, max_size=3)), draw(counts)
        if origin is Origin.POLICY:
            ledger.append(
                ids, origin, turn, draw(st.lists(singles, min_size=len(ids), max_size=len(ids))), draw(counts)
            )
        else:
            ledger.append(ids, origin, turn)
    values = st.none() | st.lists(singles, min_size=len(ledger), max_size=len(ledger))
    if draw(st.booleans()):
        ledger.training = TokenTrainingData(*(draw(values) for _ in TOKEN_TRAINING))
    return ledger


samples = st.builds(
    Sample,
    short,
    st.lists(messages, max_size=2).map(tuple),
    short,
    json_values,
    texts,
    st.none() | st.lists(short, max_size=2).map(tuple),
    st.dictionaries(short, objects, max_size=1),
    st.none() | st.builds(InteractionSpec, short, objects),
    st.lists(st.builds(Image, short), max_size=1).map(tuple),
    objects,
)
parts = st.dictionaries(short, numbers, max_size=2)
trajectories = st.builds(
    Trajectory,
    samples,
    counts,
    counts,
    st.lists(messages, max_size=2),
    st.lists(turns, max_size=2),
    st.lists(ledgers(), max_size=2),
    st.sampled_from(StopReason),
    numbers,
    texts,
    objects,
    st.none() | st.builds(RenderCheck, st.booleans(), st.booleans(), st.none() | counts, texts),
    st.none() | numbers,
    st.dictionaries(short, numbers, max_size=2),
    st.none() | numbers,
    st.none() | st.booleans(),
    st.lists(st.builds(Remark, short, short, st.none() | numbers, st.none() | counts), max_size=2),
    facts=st.builds(
        EpisodeFacts,
        st.none() | st.builds(EnvironmentRecord, st.none() | numbers, st.booleans(), parts, texts),
        st.none() | numbers,
        st.lists(objects, max_size=1),
        parts,
        texts,
        st.lists(short, max_size=2),
        st.lists(short, max_size=2),
    ),
)


def one(answer: str = "42", **changes: Any) -> Trajectory:
    prompt = (Message(Role.USER, "6*7?"),)
    call = ToolCall("c0", "calculate", {"expression": "6*7"})
    record = CallRecord(call, CallStatus.OK, 0.25)
    turn = Turn(0, Message(Role.ASSISTANT, answer, (call,)), FinishReason.STOP, 3, 1, 2, 0, 1, [record])
    ledger = Ledger()
    ledger.append([5], Origin.PROMPT, 0)
    ledger.append([6, 7], Origin.POLICY, 0, [-0.5, -0.25], 3)
    fields: dict[str, Any] = {"reward": 1.0, "parts": {"correct": 1.0}} | changes
    sample, segments = Sample("s:0", prompt, "arithmetic", "42"), fields.pop("segments", [ledger])
    return Trajectory(sample, 1, 2, [*prompt, turn.message], [turn], segments, StopReason.ANSWERED, 1.5, **fields)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(trajectories, max_size=2))
def test_everything_comes_back(tmp_path_factory: pytest.TempPathFactory, made: list[Trajectory]) -> None:
    path = tmp_path_factory.mktemp("round") / "t.parquet"
    write_trajectories(path, made)
    read = read_trajectories(path)
    assert read == made
    rows = list(range(len(made)))[::-1]
    assert read_rows(path, rows) == made[::-1]


def test_many_batches_keep_their_order(tmp_path: Path) -> None:
    made = [one(str(number)) for number in range(200)]
    write_trajectories(tmp_path / "t.parquet", iter(made))
    assert read_trajectories(tmp_path / "t.parquet") == made


def test_logprobs_come_back_bit_by_bit(tmp_path: Path) -> None:
    values = [-1e-45, -0.1, -3.4028234663852886e38, float("-inf"), -0.0, struct.unpack("f", b"\x01\x02\x03\xbf")[0]]
    trajectory = one()
    trajectory.segments[0].append([1] * 7, Origin.POLICY, 1, [*values, float("nan")], 0)
    write_trajectories(tmp_path / "t.parquet", [trajectory])
    (read,) = read_trajectories(tmp_path / "t.parquet")
    assert read.segments[0].logprobs.tobytes() == trajectory.segments[0].logprobs.tobytes()
    assert struct.pack("6f", *values) in read.segments[0].logprobs.tobytes()


def test_versions_are_kept_token_by_token(tmp_path: Path) -> None:
    trajectory = one()
    trajectory.segments[0].append([1, 2, 3], Origin.POLICY, 1, [-0.5] * 3, (VersionRun(7, 1), VersionRun(8, 2)))
    write_trajectories(tmp_path / "t.parquet", [trajectory])
    (read,) = read_trajectories(tmp_path / "t.parquet")
    assert read.segments[0].versions.tolist() == [-1, 3, 3, 7, 8, 8]


@pytest.mark.parametrize("version", ["3", "4"])
def test_older_formats_are_read_with_the_versions_of_their_turns(tmp_path: Path, version: str) -> None:
    def row(one: Trajectory) -> dict[str, Any]:
        found = to_row(one)
        for ledger in found["segments"]:
            ledger["learned"] = ledger["training"]
        return found

    trajectory, path = one(), tmp_path / "t.parquet"
    trajectory.segments[0].append([8], Origin.TOOL, 0)
    trajectory.segments[0].append([9, 10], Origin.POLICY, 1, [-1.0, -2.0], 4)
    trajectory.turns.append(Turn(1, Message(Role.ASSISTANT, "so"), FinishReason.STOP, 4, 4, 2, 0, 4))
    trajectory.segments[0].training = TokenTrainingData(entropies=[0.0, 0.5, 0.5, 0.0, 0.25, 0.25])
    rows = [row(trajectory), row(one(reward=None, segments=[])), row(one())]
    parquet.write_table(pa.Table.from_pylist(rows, schema=SCHEMAS[version]), path)
    assert read_trajectories(path) == [trajectory, one(reward=None, segments=[]), one()]
    assert read_rows(path, [2, 0]) == [one(), trajectory]
    trajectory.segments[0] = trajectory.segments[0].prefix(6)
    trajectory.segments[0].append([11], Origin.POLICY, 5, [-1.0], 0)
    parquet.write_table(pa.Table.from_pylist([row(trajectory)], schema=SCHEMAS[version]), path)
    assert read_trajectories(path)[0].segments[0].versions.tolist()[-1] == -1, "no turn tells"


def test_lone_surrogates_and_nuls_are_no_obstacle(tmp_path: Path) -> None:
    trajectory = one("a\x00b\ud800c\ud83d\ude00", artifacts={"raw": "\udfff\x00"}, failure="\ud800")
    write_trajectories(tmp_path / "t.parquet", [one(), trajectory])
    fine, read = read_trajectories(tmp_path / "t.parquet")
    assert fine == one()
    assert read.turns[0].message.text == "a\x00b\ufffdc\U0001f600" and read.failure == "\ufffd"
    assert read.artifacts == {"raw": "\udfff\x00"}
    write_jsonl(tmp_path / "t.jsonl", [trajectory])
    (line,) = (tmp_path / "t.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["messages"][1]["content"] == "a\x00b\ud800c\U0001f600"


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def test_arguments_nested_too_deeply_say_so(tmp_path: Path) -> None:
    trajectory = one()
    trajectory.turns[0].calls[0] = CallRecord(ToolCall("c0", "f", nested(100_000)), CallStatus.OK, 0.0)
    write_trajectories(tmp_path / "t.parquet", [trajectory])
    (read,) = read_trajectories(tmp_path / "t.parquet")
    assert "too deeply" in str(read.turns[0].calls[0].call.arguments)
    write_jsonl(tmp_path / "t.jsonl", [trajectory])
    assert "too deeply" in (tmp_path / "t.jsonl").read_text()


def test_values_that_are_no_json_are_named_and_leave_no_file(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"sample 's:0', sibling 1: artifacts cannot be stored.*object"):
        write_trajectories(tmp_path / "t.parquet", [one(), one(artifacts={"x": object()})])
    assert list(tmp_path.iterdir()) == []


def test_damaged_files_are_storage_errors(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_trajectories(path, [one(str(number)) for number in range(20)])
    whole = path.read_bytes()
    for damaged in (b"", b"PAR1", whole[:-1], whole[: len(whole) // 2], whole[:4] + b"\xff" * 200 + whole[204:]):
        path.write_bytes(damaged)
        with pytest.raises(StorageError, match=r"t\.parquet"):
            read_trajectories(path)
    with pytest.raises(StorageError, match=r"absent\.parquet"):
        read_trajectories(tmp_path / "absent.parquet")
    with pytest.raises(StorageError):
        read_trajectories(tmp_path)


def test_other_files_and_versions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_trajectories(path, [one()])
    table = parquet.read_table(path)
    for version, said in (("99", "update turnwise"), ("2", "record the run anew"), ("x", "update turnwise")):
        parquet.write_table(table.replace_schema_metadata({VERSION_KEY: version.encode()}), path)
        with pytest.raises(StorageError, match=rf"format {version}; this version reads 3 to 7; .*{said}"):
            read_trajectories(path)
    parquet.write_table(table.replace_schema_metadata({}), path)
    with pytest.raises(StorageError, match="not a trajectory file"):
        read_trajectories(path)
    parquet.write_table(table.drop_columns(["reward"]), path)
    with pytest.raises(StorageError, match="columns"):
        read_trajectories(path)
    rows = table.to_pylist()
    rows[0]["stop_reason"] = "bored"
    parquet.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path)
    with pytest.raises(StorageError, match="bored"):
        read_trajectories(path)


def test_jsonl_is_readable(tmp_path: Path) -> None:
    trajectory = one("line\u2028sep\x85", parts={"a": 0.5})
    trajectory.turns[0].calls[0] = CallRecord(
        ToolCall("c0", "f", {"x": float("nan"), "y": "NaN"}), CallStatus.ERROR, 0.5, score=float("inf")
    )
    write_jsonl(tmp_path / "t.jsonl", [trajectory, one()])
    text = (tmp_path / "t.jsonl").read_text(encoding="utf-8")
    entry, second = (json.loads(line, parse_constant=pytest.fail) for line in text.splitlines())
    assert entry["messages"][0] == {"role": "user", "content": "6*7?"}
    assert entry["messages"][1]["content"] == "line\u2028sep\x85"
    assert (entry["reward"], entry["parts"], entry["stop_reason"]) == (1.0, {"a": 0.5}, "answered")
    assert entry["turns"][0]["calls"][0]["arguments"] == {"x": "NaN", "y": "NaN"}
    assert entry["turns"][0]["calls"][0]["score"] == "Infinity"
    assert second["tokens"] == {"prompt": 1, "policy": 2}
    assert second["turns"][0]["completion_tokens"] == 2


def test_remarks_stay_apart_from_the_artifacts(tmp_path: Path) -> None:
    said = [Remark("llm", "it shows the digit", 0.75, 0), Remark("judge", "TRUE")]
    path, plain = tmp_path / "t.parquet", tmp_path / "plain.parquet"
    write_trajectories(path, [one(remarks=said, artifacts={"judge": "mine"})])
    write_trajectories(plain, [one(artifacts={"judge": "mine"})])
    assert parquet.read_schema(path).equals(parquet.read_schema(plain), check_metadata=True)
    (back,) = read_trajectories(path)
    assert (back.remarks, back.artifacts) == (said, {"judge": "mine"})
    write_jsonl(tmp_path / "t.jsonl", [back])
    assert json.loads((tmp_path / "t.jsonl").read_text())["remarks"][0]["text"] == "it shows the digit"


@pytest.mark.parametrize("remarks", [5, [5], [{"by": 1, "text": "", "value": None, "turn": None}], [{"by": "x"}], "x"])
def test_remarks_that_somebody_else_wrote_are_damage(tmp_path: Path, remarks: Any) -> None:
    path = tmp_path / "t.parquet"
    row = to_row(one()) | {"artifacts": json.dumps({"turnwise:remarks": remarks})}
    parquet.write_table(pa.Table.from_pylist([row], schema=SCHEMAS["6"]), path)
    with pytest.raises(StorageError, match="damaged"):
        read_trajectories(path)


def test_a_key_of_an_older_format_is_a_users_own_now(tmp_path: Path) -> None:
    mine = {"turnwise:remarks": "mine", "environment": 5, "tool_rewards": {"a": 1}}
    write_trajectories(tmp_path / "t.parquet", [one(artifacts=mine)])
    assert read_trajectories(tmp_path / "t.parquet")[0].artifacts == mine


@pytest.mark.parametrize("mine", [{"seed": 3}, {"reward": "high", "finished": True, "metrics": {}}, {"metrics": [1]}])
def test_what_a_user_had_called_environment_in_an_older_format_stays(tmp_path: Path, mine: dict[str, Any]) -> None:
    path = tmp_path / "t.parquet"
    row = to_row(one()) | {"artifacts": json.dumps({"environment": mine})}
    parquet.write_table(pa.Table.from_pylist([row], schema=SCHEMAS["6"]), path)
    (read,) = read_trajectories(path)
    assert (read.artifacts, read.facts.environment) == ({"environment": mine}, None)


@pytest.mark.parametrize("version", ["3", "4", "5", "6"])
def test_files_that_older_versions_wrote_are_read(version: str, tmp_path: Path) -> None:
    """Written by the code of their time: what lay among the artifacts comes back as fields."""
    path = Path(__file__).parent / "formats" / f"format_{version}.parquet"
    (read,) = read_trajectories(path)
    assert read.artifacts == {"checks": ["fine"]} and read.reward == 1.0
    assert read.facts == EpisodeFacts(
        EnvironmentRecord(1.0, True, {"steps": 2.0}, "busy"), 0.5, [{"length": 3}], {"calculate": 1.0},
        "KeyError: 'x'", ["seed"], ["turn 0: gone"],
    )  # fmt: skip
    assert read.render_check == RenderCheck(False, True, 3, "at token 3")
    assert read.remarks == [Remark("llm", "it shows the digit", 0.75, 0)]
    assert read.segments[0].versions.tolist() == [-1, 3, 3, -1, 3, 3]
    has_branches = version in ("5", "6")
    assert [branch.name for branch in read.branches] == ["reviewer"] * has_branches
    assert read.reused_from == (1 if has_branches else None)
    assert read_texts(path) == [["6*7?", "Let me see.", "42", "#### 42"] + ["6*7?", "#### 42"] * has_branches]
    write_trajectories(tmp_path / "t.parquet", [read])
    assert read_trajectories(tmp_path / "t.parquet") == [read]


HOSTILE: dict[str, Any] = {
    "versions one short": lambda row: row["segments"][0]["versions"].pop(),
    "turns below zero": lambda row: row["segments"][0]["turns"].__setitem__(0, -1),
    "token ids below zero": lambda row: row["segments"][0]["token_ids"].__setitem__(0, -5),
    "an unknown origin": lambda row: row["segments"][0]["origins"].__setitem__(0, 99),
    "a null among log-probs": lambda row: row["segments"][0]["logprobs"].__setitem__(-1, None),
    "no log-probs": lambda row: row["segments"][0].update(logprobs=None),
    "no turns in a ledger": lambda row: row["segments"][0].update(turns=None),
    "no ledgers": lambda row: row.update(segments=None),
    "a ledger that is null": lambda row: row.update(segments=[None]),
    "training of another length": lambda row: row["segments"][0].update(
        training=dict.fromkeys(TOKEN_TRAINING) | {"logprobs": [0.0]}
    ),
    "no id": lambda row: row.update(sample_id=None),
    "no source": lambda row: row.update(data_source=None),
    "info that is a number": lambda row: row.update(info="5"),
    "a turn nowhere": lambda row: row["turns"][0].update(index=-50),
    "a turn without a version": lambda row: row["turns"][0].update(policy_version=None),
    "a version beyond all": lambda row: row["turns"][0].update(policy_version=2**40),
}


@pytest.mark.parametrize("version", sorted(SCHEMAS))
def test_what_no_trajectory_can_be_is_refused_with_the_name_of_its_file(tmp_path: Path, version: str) -> None:
    trajectory = one()
    ledger = Ledger()
    ledger.append([1, 2], Origin.PROMPT, 0)
    ledger.append([3], Origin.POLICY, 0, [-0.5], 4)
    trajectory.segments = [ledger]
    assert trajectory.turns
    path = tmp_path / "t.parquet"
    names = {field.name for field in SCHEMAS[version].field("segments").type.value_type}

    def write(change: Any) -> None:
        row = to_row(trajectory)
        change(row)
        for segment in row["segments"] or ():
            if segment and "learned" in names:
                segment["learned"] = segment.pop("training")
        parquet.write_table(pa.Table.from_pylist([row], schema=SCHEMAS[version]), path)

    write(lambda row: None)
    assert len(read_trajectories(path)) == 1
    for what, change in HOSTILE.items():
        if what == "versions one short" and "versions" not in names:
            continue
        write(change)
        with pytest.raises(StorageError, match=r"cannot read .*t\.parquet"):
            read_trajectories(path)


def test_a_turn_with_a_huge_number_costs_no_memory(tmp_path: Path) -> None:
    trajectory = one()
    trajectory.turns[0].index = 2**31 - 1
    row = to_row(trajectory)
    for segment in row["segments"]:
        segment.pop("versions")
    parquet.write_table(pa.Table.from_pylist([row], schema=SCHEMAS["4"]), tmp_path / "t.parquet")
    assert read_trajectories(tmp_path / "t.parquet")[0].turns[0].index == 2**31 - 1


def test_branches_come_back_as_they_were(tmp_path):
    prompt, said = Message(Role.USER, (Text("look"), Image("a.png"))), Message(Role.ASSISTANT, "fine")

    def turn(index: int, segment: int) -> Turn:
        return Turn(index, said, FinishReason.STOP, 0, 1, 2, segment=segment, start=1)

    def ledger(index: int) -> Ledger:
        made = Ledger()
        made.append([3], Origin.PROMPT, index)
        made.append([4, 5], Origin.POLICY, index, [-0.5, -0.25], 0)
        return made

    def episode(branches: list[Branch]) -> Trajectory:
        sample = Sample("s", (prompt,), "test")
        ledgers = [ledger(index) for index in range(1 + len(branches))]
        return Trajectory(
            sample, 0, 0, [prompt, said], [turn(0, 0)], ledgers, StopReason.ANSWERED, 0.1, branches=branches
        )

    told = [Branch("red", [prompt, said], [turn(1, 1)]), Branch("blue", [prompt, said], [turn(2, 2)], trained=False)]
    trajectory = episode(told)
    write_trajectories(tmp_path / "t.parquet", [trajectory, episode([])])
    read = read_trajectories(tmp_path / "t.parquet")
    assert [one.branches for one in read] == [told, []] and read[0].artifacts == {}
    assert [len(one.segments) for one in read] == [3, 1]
    assert read_texts(tmp_path / "t.parquet") == [["look", "a.png", "fine"] * 3, ["look", "a.png", "fine"]]
    assert from_row(json.loads(json.dumps(to_row(trajectory)))).branches == told
    shown = "".join(str(line) for line in transcript(read[0]).renderables)
    assert "branch red" in shown and "branch blue, not trained" in shown and "assistant, turn 2" in shown
    write_jsonl(tmp_path / "t.jsonl", read)
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert [[branch["name"] for branch in line["branches"]] for line in lines] == [["red", "blue"], []]
    damaged = to_row(trajectory)
    damaged["branches"][0]["name"] = 7
    with pytest.raises(ValueError, match="branch"):
        from_row(damaged)
