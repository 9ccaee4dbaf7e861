"""A frozen run: everything the page asks is in the file, nothing a model wrote gets out of its place, no network."""

import asyncio
import base64
import dataclasses
import json
import re

import httpx
import pytest

from turnwise.errors import ConfigError, StorageError
from turnwise.ext.board import static_files
from turnwise.ext.board.access import BoardAddress
from turnwise.ext.board.app import make_app
from turnwise.ext.board.runs import Runs
from turnwise.ext.board.standalone_html import FLIPPED_TO_RIGHT, FLIPPED_TO_WRONG, address, freeze, quoted, safe_json
from turnwise.storage.index import record
from turnwise.types import Image, Message, Role, Text

HOSTILE = "</script><script>alert(1)</script><!--<script>"
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
SCRIPT = re.compile(r"<script([^>]*)>(.*?)</script>", re.DOTALL)


def frozen(report):
    """What the file's data block holds."""
    text = report.content.decode()
    return json.loads(re.search(r'<script type="application/json" id="frozen">(.*?)</script>', text, re.DOTALL)[1])


def asked(report, tail):
    """The addresses of the answers that end so, parameters left out."""
    return [one for one in frozen(report)["answers"] if one.partition("?")[0].endswith(tail)]


@pytest.fixture
def full_run(run_dir, make):
    """Eight steps of one group of two, one evaluation."""
    for step in range(8):
        rows = [
            make("s0", step=step, sibling=sibling, reward=float(sibling), learned=True, answer=f"It is {step}.")
            for sibling in range(2)
        ]
        record(run_dir, f"trajectories/step_{step:06d}.parquet", rows)
        run_dir.append_jsonl("metrics.jsonl", {"step": step, "seconds": 1.0 + step, "critic/score/mean": 0.5})
    wrong = make("odd", step=7, reward=0.4, parts={"acc": 0.0, "format": 0.4})
    flipped = make("back", step=7, reward=0.0, first_right=True)
    record(run_dir, "eval/step_000007.parquet", [make("e0", step=7), wrong, flipped])
    return run_dir


def test_an_address_is_what_the_page_asks():
    assert address("/api/runs") == "/api/runs"
    assert address("/x", b="a b", a="(1)/*'", empty="", none=None, offset=0) == "/x?a=(1)%2F*'&b=a%20b&offset=0"


def test_the_file_stands_alone(full_run):
    text = freeze(full_run.path, most=1).content.decode()
    outside = SCRIPT.sub("", re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL))
    assert "src=" not in outside
    assert re.findall(r'href="([^"]*)"', outside) == ["data:,"]
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1].replace("&#x27;", "'")
    assert policy.startswith("default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline';")
    assert text.index("Content-Security-Policy") < text.index("<script")
    scripts = SCRIPT.findall(text)
    assert scripts and all("src" not in attributes for attributes, _ in scripts)


def test_every_module_that_is_imported_is_in_the_file(full_run):
    text = freeze(full_run.path, most=1).content.decode()
    imports = json.loads(re.search(r'<script type="importmap">(.*?)</script>', text)[1])["imports"]
    assert "board/main.js" in imports
    bodies = [base64.b64decode(url.partition("base64,")[2]).decode() for url in imports.values()]
    named = {name for body in bodies for name in re.findall(r'(?:from|import) "([^"]+)"', body)}
    assert named and named <= set(imports)


def test_the_answers_are_the_servers(full_run):
    report = freeze(full_run.path, most=5)
    answers = frozen(report)["answers"]
    app = make_app(Runs([full_run.path]), BoardAddress("127.0.0.1", 7007))

    async def ask(addresses):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:7007") as client:
            return {one: (await client.get(one)).json() for one in addresses}

    base = f"/api/runs/{full_run.name}"
    same = [f"{base}/{page}" for page in ("config", "spread", "tools", "health", "fields", "series?names=*")]
    same += [one for one in answers if one.startswith((f"{base}/group?", f"{base}/tokens?"))]
    assert len(same) > 10
    served = asyncio.run(ask(same))
    for one in same:
        assert answers[one] == served[one], one
    opened = [one for one in answers if one.startswith(f"{base}/trajectory?")]
    assert opened
    for one, found in asyncio.run(ask(opened)).items():
        own = answers[one] | {"neighbours": found["neighbours"], "siblings": found["siblings"]}
        assert own == found


def test_every_link_between_the_pages_has_an_answer(full_run, make):
    record(full_run, "trajectories/step_000008.parquet", [make("s0", step=8, failure="no 'room' left", reward=None)])
    report = freeze(full_run.path)
    answers = frozen(report)["answers"]
    base = f"/api/runs/{full_run.name}"
    common = {"sort": "step", "order": "desc", "offset": 0, "limit": 50}
    whole = answers[address(f"{base}/trajectories", split="all", **common)]
    assert whole["matched"] == len(whole["rows"]) == report.trajectories
    assert whole["total"] == 20
    for row in whole["rows"]:
        place = {"shard": row["shard"], "row": row["row"]}
        assert address(f"{base}/trajectory", **place) in answers
        assert address(f"{base}/tokens", **place) in answers
        assert address(f"{base}/group", shard=row["shard"], sample=row["sample_id"]) in answers
    links = [(finding["filter"], finding["split"]) for finding in answers[f"{base}/health"]["findings"]]
    links += [(failure["filter"], "all") for failure in answers[f"{base}/tools"]["failures"]]
    links += [('data_source == "arithmetic" and failure == null', "train")]
    links += [(FLIPPED_TO_RIGHT, "eval"), (FLIPPED_TO_WRONG, "eval")]
    for filter, split in links:
        if filter:
            assert address(f"{base}/trajectories", filter=filter, split=split, **common) in answers


def test_the_page_makes_the_links_that_the_report_expects():
    page = (static_files.STATIC / "js" / "pages" / "tools.js").read_text()
    assert "data_source == ${quoted(source)} and failure == null" in page
    assert FLIPPED_TO_RIGHT in page and FLIPPED_TO_WRONG in page
    listed = (static_files.STATIC / "js" / "pages" / "trajectories.js").read_text()
    assert "const LIMIT = 50;" in listed
    assert 'sort: "step", order: "desc"' in listed


def test_a_quoted_text_is_the_same_text_to_a_filter(run_dir, make):
    sources = [
        'a "b"\\',
        "right\u202e to left",
        "new\nline",
        "caf\u00e9 \U0001f600",
        "tag \U000e0041",
        HOSTILE,
        "s" * 3000,
    ]
    rows = [make(f"s{number}", source=source) for number, source in enumerate(sources)]
    record(run_dir, "trajectories/step_000001.parquet", rows)
    assert quoted(sources[1]) == '"right\\u202e to left"'
    assert quoted(sources[4]) == '"tag \\U000e0041"'
    report = freeze(run_dir.path)
    lists = [
        one for name, one in frozen(report)["answers"].items() if "/trajectories?" in name and "data_source" in name
    ]
    assert sorted(one["rows"][0]["data_source"] for one in lists) == sorted(sources[:-1])
    assert all(one["matched"] == 1 for one in lists)


def test_surprising_trajectories_are_chosen_first(full_run):
    report = freeze(full_run.path, most=6)
    entries = [frozen(report)["answers"][one]["entry"] for one in asked(report, "/trajectory")]
    chosen = {(entry["sample_id"], entry["reward"]) for entry in entries}
    assert {("odd", 0.4), ("back", 0.0)} <= chosen
    assert {reward for sample, reward in chosen if sample.startswith("s")} == {0.0, 1.0}


def test_a_filter_chooses_and_a_bad_one_is_told(full_run):
    report = freeze(full_run.path, most=3, filter="step == 4 and reward >= 0")
    assert report.trajectories == 2
    assert ["step_000004" in one for one in asked(report, "/trajectory")] == [True, True]
    with pytest.raises(ConfigError, match="did you mean 'reward'"):
        freeze(full_run.path, filter="rewrad > 1")
    with pytest.raises(ConfigError, match="passes none of 19"):
        freeze(full_run.path, filter="reward > 7")


def test_what_a_model_wrote_stays_text(run_dir, make):
    told = make("s0", answer=HOSTILE, question=HOSTILE, failure=HOSTILE, source=HOSTILE)
    told.artifacts = {"__proto__": {"url": HOSTILE}, "reason": HOSTILE}
    record(run_dir, "trajectories/step_000001.parquet", [told])
    report = freeze(run_dir.path)
    text = report.content.decode()
    assert len(SCRIPT.findall(text)) == 5  # import map, plotly, data, start, main
    assert "alert(1)</script>" not in text and "<script>alert" not in text
    [place] = asked(report, "/trajectory")
    answer = frozen(report)["answers"][place]
    assert answer["turns"][-1]["message"]["text"] == HOSTILE
    assert answer["artifacts"]["__proto__"] == {"url": HOSTILE}


def test_json_for_a_script_has_no_way_out():
    text = safe_json({"a": "<\ud800\u2028", "b": float("nan"), "c": (1.5, float("inf"))})
    assert "<" not in text
    assert json.loads(text) == {"a": "<\ud800\u2028", "b": None, "c": [1.5, None]}
    text.encode()


def test_an_image_is_in_the_file_once_and_a_models_words_are_no_image(run_dir, make, tmp_path):
    picture = tmp_path / "cat.png"
    picture.write_bytes(PNG)

    def seen(sibling):
        one = make("s0", sibling=sibling)
        shown = Message(Role.USER, (Image(str(picture)), Text("What is it?")))
        info = {"url": "https://example.org/x.png", "source_url": "image:0"}
        one.messages = [shown, *one.messages[len(one.sample.prompt) :]]
        one.sample = dataclasses.replace(one.sample, prompt=(shown,), images=(Image(str(picture)),), info=info)
        return one

    record(run_dir, "trajectories/step_000001.parquet", [seen(0), seen(1)])
    report = freeze(run_dir.path, filter="step == 1")
    assert report.content.count(base64.b64encode(PNG)) == 1
    data = frozen(report)
    [name] = data["images"]
    assert data["images"][name] == f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    places = list(asked(report, "/trajectory"))
    assert len(places) == 2
    for place in places:
        answer = data["answers"][place]
        assert answer["prompt"][0]["images"][0]["url"] == answer["images"][0]["url"] == name
        assert answer["info"] == {"url": "https://example.org/x.png", "source_url": "image:0"}
    assert b"/image?name=" not in safe_json(data["answers"]).encode()


def test_what_cannot_be_read_is_told(full_run):
    (full_run.path / "trajectories" / "step_000007.parquet").write_bytes(b"no parquet")
    report = freeze(full_run.path, filter='split == "train" and step >= 6')
    assert report.trajectories == 2
    assert len(report.left_out) == 2
    assert all("step_000007" in one for one in report.left_out)


def test_a_run_without_trajectories_or_metrics_freezes_too(run_dir):
    report = freeze(run_dir.path)
    assert report.trajectories == 0
    assert frozen(report)["start"] == f"#/run/{run_dir.name}/curves"
    with pytest.raises(StorageError, match="no run 'other'"):
        freeze(run_dir.path.parent / "other")
