"""A trajectory's page shows what was recorded, as JSON that any browser reads."""

import base64
import json
import struct
import zlib

import pytest

from turnwise.errors import StorageError
from turnwise.ext.board.conversation import conversation, measured, waterfall, weights_of
from turnwise.ext.board.images import Pictures
from turnwise.ext.board.json_values import plain
from turnwise.ext.board.table import NotThere, Table
from turnwise.storage.images.reader import stored_name
from turnwise.storage.index import record
from turnwise.system.image_sources import unread
from turnwise.types import CallStatus, Image, Message, Remark, RenderCheck, Role, Text

FILE, SHARD = "trajectories/step_000001.parquet", "trajectories/step_000001"


def png(width=4, height=3):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    pixels = zlib.compress((b"\0" + b"\xff\0\0" * width) * height)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def page(run, trajectories, row=0):
    record(run, FILE, trajectories)
    table = Table(run)
    table.refresh(None)
    found = conversation(run, table, SHARD, row)
    json.dumps(found, allow_nan=False, ensure_ascii=False).encode()
    return found


def test_turns_calls_and_replies_stand_where_they_belong(run_dir, make, call):
    calls = [call(0, "print(6*7)", peak_memory=5), call(1, "1/0", CallStatus.ERROR)]
    told = make(calls=calls, render_check=RenderCheck(False, True, 3), advantage=0.5)
    told.turns[0].replies[1] = Message(Role.TOOL, "division by zero", tool_call_id="call_1")
    told.turns[0].replies.append(Message(Role.USER, "go on"))
    told.turns[0].user_score = 0.25
    told.turns[1].scores = {"tool": 0.5}
    found = page(run_dir, [told])
    assert [message["role"] for message in found["prompt"]] == ["system", "user"]
    first, second = found["turns"]
    assert first["message"]["reasoning"] == "let me see" and first["message"]["answer"] == ""
    assert [c["id"] for c in first["message"]["tool_calls"]] == ["call_0", "call_1"]
    assert [(c["name"], c["status"], c["reply"]["text"]) for c in first["calls"]] == [
        ("python", "ok", "the result is 42"),
        ("python", "error", "division by zero"),
    ]
    assert first["calls"][0]["arguments"] == {"code": "print(6*7)"} and first["calls"][0]["info"] == {"peak_memory": 5}
    assert [reply["text"] for reply in first["replies"]] == ["go on"]
    assert first["user_score"] == 0.25 and second["scores"] == {"tool": 0.5} and second["generate_seconds"] == 0.5
    assert second["calls"] == [] and second["message"]["text"] == "It is 42."
    assert found["tokens"] == {"prompt": 2, "policy": 4, "tool": 1, "user": 0, "template": 0, "segments": 1}
    assert found["render_check"] == {"exact": False, "same_text": True, "position": 3}
    assert found["ground_truth"] == "42" and found["stop_reason"] == "answered" and found["failure"] is None
    assert found["entry"]["advantage"] == 0.5


def test_neighbours_and_siblings(run_dir, make):
    rows = [make("a"), make("b"), make("a", sibling=1)]
    record(run_dir, FILE, rows)
    table = Table(run_dir)
    table.refresh(None)
    pages = [conversation(run_dir, table, SHARD, row) for row in range(3)]
    assert [(p["neighbours"]["previous"], p["neighbours"]["next"]) for p in pages] == [(None, 1), (0, 2), (1, None)]
    assert [p["siblings"] for p in pages] == [[0, 2], [1], [0, 2]]
    for shard, row in ((SHARD, 3), (SHARD, -1), ("trajectories/step_000009", 0)):
        with pytest.raises(NotThere):
            conversation(run_dir, table, shard, row)


def test_a_call_that_was_never_answered_has_no_reply(run_dir, make):
    told = make()
    told.turns[0].replies = []
    assert page(run_dir, [told])["turns"][0]["calls"][0]["reply"] is None


def test_images_of_tools_come_with_their_crop_and_its_source(run_dir, make, call, tmp_path):
    source = tmp_path / "street.png"
    source.write_bytes(png())
    drawn = "data:image/png;base64," + base64.b64encode(png(2, 2)).decode()
    crop = {
        "name": "show",
        "size": [2, 2],
        "source": "street.png",
        "box": [1, 0, 3, 2],
        "steps": [{"name": "crop", "arguments": {"box": [1, 0, 3, 2]}}],
        "data": drawn,
    }
    lost = {"name": "figure", "size": "large", "source": None, "box": [1, float("inf"), 2, 3]}
    images = {"images": (Image(str(source)), Image(drawn))}
    told = make(calls=[call(0, "show()", images=[crop, lost, "nonsense"])], sample_fields=images)
    found = page(run_dir, [told])
    first, second = found["turns"][0]["calls"][0]["images"]
    assert first["box"] == [1, 0, 3, 2] and first["size"] == [2, 2] and first["steps"][0]["name"] == "crop"
    assert first["source_url"] == found["images"][0]["url"]
    assert first["url"].startswith("/api/runs/first/image?name=images%2F") and first["url"] != first["source_url"]
    assert found["images"][0]["source"] == str(source)
    assert found["images"][1] == {"url": first["url"], "source": stored_name(png(2, 2))}, "each picture once"
    nothing = dict.fromkeys(("url", "shown_url", "size", "source_url", "source_size", "provenance", "box", "matrix"))
    assert second == nothing | {"name": "figure", "claimed": False, "steps": []}


def test_images_in_messages(run_dir, make):
    inline = "data:image/png;base64," + base64.b64encode(png()).decode()
    told = make()
    told.turns[0].replies = [
        Message(Role.TOOL, (Text("look: "), Image(inline), Image("gone.png")), tool_call_id="call_0")
    ]
    record_json = page(run_dir, [told])["turns"][0]["calls"][0]
    kept = stored_name(png())
    url = Pictures(run_dir).file_url(kept)
    assert record_json["reply"]["text"] == "look: "
    assert [image["url"] for image in record_json["reply"]["images"]] == [url, None]
    assert [(image["url"], image["box"]) for image in record_json["images"]] == [(url, None), (None, None)]
    assert [image["name"] for image in record_json["images"]] == [kept.split("/")[1], "gone.png"]
    (run_dir.path / kept).unlink()
    assert Pictures(run_dir).reference(Image(unread(kept))) == {"url": None, "source": kept}, "gone, and named"


def test_the_waterfall_ends_at_the_reward(make):
    assert waterfall(make(reward=1.5, parts={"acc": 1.0, "format": 0.5}), {}) == [
        {"name": "acc", "value": 1.0, "total": 1.0},
        {"name": "format", "value": 0.5, "total": 1.5},
    ]
    weighted = waterfall(make(reward=0.8, parts={"acc": 1.0, "tool": -0.5}), {"tool": 0.4})
    assert weighted == [
        {"name": "acc", "value": 1.0, "total": 1.0},
        {"name": "tool", "value": pytest.approx(-0.2), "total": pytest.approx(0.8)},
    ]
    assert waterfall(make(reward=0.3, parts={"a": 0.1, "b": 0.2}), {})[-1]["name"] == "b", "rounding is no difference"


@pytest.mark.parametrize("reward", [1.0, None, float("nan")])
def test_parts_that_are_no_summands_are_only_measured(make, reward):
    odd = make(reward=reward, parts={"acc": 1.0, "format": 1.0, "bad": float("nan")})
    assert waterfall(odd, {}) is None
    assert measured(odd) == [{"name": name, "value": 1.0, "total": 1.0} for name in ("acc", "format")]


def test_weights_come_from_the_config_of_the_run(run_dir):
    assert weights_of(run_dir) == {}
    run_dir.write_text("config.yaml", "scoring: {weights: {tool: 0.5, acc: odd}}\n")
    assert weights_of(run_dir) == {"tool": 0.5}
    run_dir.write_text("config.yaml", "[")
    assert weights_of(run_dir) == {}


def test_the_judges_words_are_found_wherever_they_were_recorded(run_dir, make, call):
    told = make(calls=[call(0, "x", judge_reason="the crop shows the sign", seconds=3)])
    told.facts.user_notes = [{"say": "too short"}, {"deep": {"verdict": "wrong unit"}}]
    told.facts.user_score = 0.5
    told.artifacts = {
        "files": {"a.py": "print(1)"},
        "judge": {"votes": ["TRUE", ""], "score": 1.0},
    }
    found = page(run_dir, [told])
    assert found["verdicts"] == [
        {"name": "user_notes 1, say", "text": "too short"},
        {"name": "user_notes 2, deep, verdict", "text": "wrong unit"},
        {"name": "judge, votes 1", "text": "TRUE"},
        {"name": "turn 0, python, judge_reason", "text": "the crop shows the sign"},
    ]


def test_what_a_judge_said_of_a_turn_stands_with_it_and_of_the_whole_comes_first(run_dir, make):
    told = make()
    told.artifacts = {"judge": "later"}
    told.remarks = [Remark("llm", "it shows the sign", 0.75, 0), Remark("rule exact_match", "right\ud800")]
    told.remarks += [Remark("llm", "of a turn that never was", 0.5, 9)]
    found = page(run_dir, [told])
    assert found["verdicts"] == [
        {"name": "rule exact_match", "text": "right\ufffd"},
        {"name": "turn 9, llm, 0.5", "text": "of a turn that never was"},
        {"name": "judge", "text": "later"},
    ]
    assert [turn["remarks"] for turn in found["turns"]] == [
        [{"by": "llm", "text": "it shows the sign", "value": 0.75}],
        [],
    ]


def test_values_json_cannot_hold_are_mended(run_dir, make):
    deep: dict = {}
    inner = deep
    for _ in range(200):
        inner["in"] = {}
        inner = inner["in"]
    told = make(sample_fields={"info": {"raw": b"\0\1", "n": float("nan"), "half": "\ud800", "deep": deep, 3: 4}})
    told.failure = "bad"
    found = page(run_dir, [told])
    assert found["info"]["raw"] == "(2 bytes)" and found["info"]["n"] is None and found["info"]["3"] == 4
    assert len(json.dumps(found["info"]["deep"])) < 2000
    assert plain("x" * 200_000).endswith("(200000 characters)")
    assert plain((1, float("inf"))) == [1, None]


def test_an_endpoints_trajectory_has_no_ledger(run_dir, make):
    told = make()
    told.segments = []
    assert page(run_dir, [told])["tokens"] == {"policy": 4}


def test_a_damaged_file_is_a_storage_error_and_a_shorter_one_is_not_there(run_dir, make):
    record(run_dir, FILE, [make("a"), make("b")])
    table = Table(run_dir)
    table.refresh(None)
    from turnwise.storage.trajectories.files import write_trajectories

    write_trajectories(run_dir.path / FILE, [make("a")])
    with pytest.raises(NotThere, match="written anew"):
        conversation(run_dir, table, SHARD, 1)
    (run_dir.path / FILE).write_bytes(b"PAR1")
    with pytest.raises(StorageError):
        conversation(run_dir, table, SHARD, 1)
