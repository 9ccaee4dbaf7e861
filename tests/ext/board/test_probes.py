"""A probe on the board: its numbers, which episodes belong together, and pictures as they were and as they were shown."""

import json

import pytest
from looking import FIRST, TARGET, write_looked, write_probed

from turnwise.errors import StorageError
from turnwise.ext.board.conversation import box_of, conversation, target_boxes
from turnwise.ext.board.images import image_bytes
from turnwise.ext.board.probes import counterparts, probe, read_probe, with_counterparts
from turnwise.ext.board.standalone_html import freeze
from turnwise.ext.board.table import NotThere, Table, listing
from turnwise.ext.board.tokens import tokens
from turnwise.storage.images.copies import stored_name

BEFORE, AFTER = "eval/step_000000", "probes/blank"


@pytest.fixture
def probed(run_dir):
    write_probed(run_dir)
    table = Table(run_dir)
    table.refresh(None)
    return run_dir, table


def test_episodes_are_paired_by_sample_and_those_that_differ_come_first(probed):
    found = probe(*probed)
    assert found["probes"] == {"none": BEFORE, "blank": AFTER} and found["total"] == 2
    assert found["results"][0]["after"] == 0.5 and found["results"][0]["change_stderr"] == 0.5
    first, second = found["pairs"]
    assert first["sample_id"] == "test:1" and first["differs"] and not second["differs"]
    assert first["played"]["none"] == {"shard": BEFORE, "row": 1, "right": True, "answer": "7"}
    assert first["played"]["blank"] == {"shard": AFTER, "row": 0, "right": False, "answer": "3"}
    assert counterparts(*probed, AFTER, 0) == first["played"]
    assert with_counterparts(*probed, [(BEFORE, 0)]) == [(BEFORE, 0), (AFTER, 1)]
    assert [row["row"] for row in listing(probed[1], split="probe")["rows"]] == [0, 1]
    assert probed[1].damaged == []


def test_what_the_model_was_shown_instead_is_told_beside_what_the_tool_gave(probed):
    before, after = (
        conversation(*probed, *place)["turns"][0]["calls"][0]["images"] for place in ((BEFORE, 0), (AFTER, 1))
    )
    assert before[0]["shown_url"] is None and before[0]["url"] == after[0]["url"]
    assert after[0]["shown_url"].startswith("/api/runs/") and after[0]["shown_url"] != after[0]["url"]
    assert after[0]["box"] == list(FIRST)


def test_a_run_that_is_no_probe_has_none(run_dir, make):
    write_looked(run_dir)
    table = Table(run_dir)
    table.refresh(None)
    assert read_probe(run_dir) is None
    assert conversation(run_dir, table, "trajectories/step_000001", 0)["probes"] == {}
    with pytest.raises(NotThere, match="is not a probe"):
        probe(run_dir, table)


@pytest.mark.parametrize("text", ["[", "[]", "{}", '{"baseline": 3, "probes": {}, "results": []}', "[" * 100_000])
def test_a_file_that_no_probe_wrote_is_told(probed, text):
    (probed[0].path / "probe.json").write_text(text)
    with pytest.raises(StorageError, match="probe"):
        read_probe(probed[0])


def test_only_files_of_trajectories_and_numbers_are_taken_from_it(probed):
    odd = {"baseline": "../../etc/passwd", "probes": {"a": "config.yaml", "b": 3, "blank": "probes/blank.parquet"}}
    results = [{"data_source": "\ud800", "n": "many", "before": float("nan"), "after": 10**400}, "none"]
    (probed[0].path / "probe.json").write_text(json.dumps(odd | {"results": results}))
    found = probe(*probed)
    assert found["probes"] == {"blank": AFTER} and found["pairs"] == []
    assert found["results"][0]["data_source"] == "\ufffd" and found["results"][0]["before"] is None
    json.dumps(found, allow_nan=False).encode()
    assert conversation(*probed, AFTER, 0)["probes"].keys() == {"blank"}


def test_crops_targets_and_claims(run_dir):
    write_looked(run_dir)
    table = Table(run_dir)
    table.refresh(None)
    found = conversation(run_dir, table, "trajectories/step_000001", 0)
    assert found["targets"] == [TARGET] and [one["name"] for one in found["sources"]] == ["canvas_0.png"]
    images = [turn["calls"][0]["images"][0] for turn in found["turns"][:3]]
    assert [image["provenance"] for image in images] == ["verified", "verified", "contradicted"]
    assert [image["claimed"] for image in images] == [False, False, True]
    assert images[0]["source_url"] == found["sources"][0]["url"] and images[0]["source_size"] == [256, 256]
    assert images[0]["matrix"] == [1, 0, 32, 0, 1, 160] and images[2]["matrix"] is None
    assert images[2]["box"] == [16, 16, 48, 48] and [step["name"] for step in images[2]["steps"]] == ["crop"]
    assert found["turns"][0]["remarks"] == [{"by": "llm", "text": "the crop shows the digit", "value": 0.75}]


def test_a_hostile_record_gives_json_without_boxes_that_are_none(run_dir):
    write_looked(run_dir, "<script>\ud800")
    table = Table(run_dir)
    table.refresh(None)
    found = conversation(run_dir, table, "trajectories/step_000001", 1)
    json.dumps(found, allow_nan=False, ensure_ascii=False).encode()
    images = found["turns"][0]["calls"][0]["images"]
    assert [image["box"] for image in images[:6]] == [[-50, -50, 400, 400], [300, 300, 400, 400], *[None] * 4]
    assert found["targets"] == [[-10, -10, 400, 400]]
    assert all(image["url"] is None or image["url"].startswith(("/api/", "data:image/png")) for image in images)
    assert images[-1]["claimed"] and images[-1]["source_url"] is None and images[-3]["source_size"] is None


def test_a_link_is_no_probe(probed, tmp_path):
    elsewhere = tmp_path / "elsewhere.json"
    (probed[0].path / "probe.json").rename(elsewhere)
    (probed[0].path / "probe.json").symlink_to(elsewhere)
    assert read_probe(probed[0]) is None


def test_images_among_tokens_come_with_their_picture(run_dir):
    write_looked(run_dir)
    table = Table(run_dir)
    table.refresh(None)
    found = tokens(run_dir, table, "trajectories/step_000001", 0, name="a b")["segments"][0]
    spans = [(image["start"], image["end"]) for image in found["images"]]
    assert spans == [(1, 17), (21, 37), (41, 57), (61, 77)]
    assert found["pieces"][1] == "[image, 16 tokens]" and set(found["pieces"][2:17]) == {""}
    head = "/api/runs/a%20b/image?name=images%2F"
    assert all(image["url"].startswith(head) for image in found["images"])
    name = "images/" + found["images"][0]["url"].removeprefix(head)
    content, kind = image_bytes(run_dir, name)
    assert kind == "image/png" and stored_name(content) == name
    (run_dir.path / name).unlink()
    again = tokens(run_dir, table, "trajectories/step_000001", 0)["segments"][0]["images"]
    assert [image["url"] is None for image in again] == [True, False, False, False]


def test_a_report_of_a_probe_holds_both_sides_and_all_their_images(probed):
    made = freeze(probed[0].path, most=1)
    assert made.trajectories == 2 and made.left_out == ()
    text = made.content.decode()
    held = json.loads(text.partition('id="frozen">')[2].partition("</script>")[0])
    assert f"/api/runs/{probed[0].name}/probe" in held["answers"]
    chips = [
        one for name, answer in held["answers"].items() if "/tokens?" in name for one in answer["segments"][0]["images"]
    ]
    assert len(chips) == 4 and all(one["url"] in held["images"] for one in chips)


def test_boxes_that_are_none():
    assert box_of([1, 2, 3, 4.5]) == [1, 2, 3, 4.5] and box_of((-5, -5, 1, 1)) == [-5, -5, 1, 1]
    for odd in (
        [1, 2, 1, 4],
        [1, 2, 3],
        [True, 0, 1, 1],
        ["0", 0, 1, 1],
        [0, 0, float("inf"), 1],
        None,
        [0, 0, 10**400, 1],
    ):
        assert box_of(odd) is None


def test_targets_stand_in_the_truth_or_beside_it(make):
    sample = make(sample_fields={"info": {"extra_info": {"target_boxes": [[0, 0, 1, 1], "x", [3, 3, 2, 2]]}}}).sample
    assert target_boxes(sample) == [[0, 0, 1, 1]]
    sample.info["extra_info"] = {"target_boxes": {"a": 1}}
    assert target_boxes(sample) == []
