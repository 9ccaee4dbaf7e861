"""The data that people have: tables, packed files, globs, folders, saved datasets, and datasets of the hub."""

import gzip
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from turnwise import configure
from turnwise.data.files import Split, data_files, is_on_the_hub
from turnwise.data.loader import load_samples
from turnwise.data.rows import read_rows
from turnwise.data.write import write_rows
from turnwise.errors import DataError
from turnwise.training.runs.trust import reaches

ROWS = [
    {"data_source": "s", "prompt": f"{n}+1?", "reward_model": {"ground_truth": str(n + 1)}, "extra_info": {"index": n}}
    for n in range(3)
]
TABLE = """data_source,prompt,reward_model.ground_truth,extra_info.index,agent_name
s,"0+1?
(a line of ""its"" own)",1,0,
s,1+1?,2,1,single_turn
"""


def lines(rows: Any = ROWS) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def truths(*names: object, split: Split | None = None) -> list[Any]:
    return [sample.ground_truth for sample in load_samples([str(one) for one in names], split=split, prompt_key="prompt")]  # fmt: skip


def refusal(*names: object, split: Split | None = None) -> str:
    with pytest.raises(DataError) as refused:
        truths(*names, split=split)
    text = str(refused.value)
    assert "\n" not in text and len(text) < 700
    return text


def test_tables(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("\ufeff" + TABLE)
    (tmp_path / "a.tsv").write_text("data_source\tprompt\treward_model\ns\t1+1?\t{\"ground_truth\": \"2\"}\n")  # fmt: skip
    first, second = load_samples([tmp_path / "a.csv"], prompt_key="prompt")
    assert first.prompt[0].text == '0+1?\n(a line of "its" own)' and (first.ground_truth, first.agent) == ("1", None)
    assert second.agent == "single_turn" and second.info["extra_info"] == {"index": "1"}
    assert truths(tmp_path / "a.tsv") == ["2"]
    messages = json.dumps([{"role": "user", "content": "hi, you"}]).replace('"', '""')
    (tmp_path / "m.csv").write_text(f'data_source,prompt,reward_model\ns,"{messages}","{{""ground_truth"": ""4""}}"\n')
    (sample,) = load_samples([tmp_path / "m.csv"], prompt_key="prompt")
    assert sample.prompt[0].text == "hi, you" and sample.ground_truth == "4"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "empty"),
        ("prompt,data_source\n", "has no rows"),
        ("prompt,prompt\na,b\n", "column 'prompt' appears twice"),
        ("prompt,data_source\na\n", "a.csv:2: 1 cells under 2 columns"),
        ("prompt,data_source\na,b,c\n", "a.csv:2: 3 cells under 2 columns"),
        ('prompt,data_source\n"a,b\n', "not a readable table"),
        ("prompt,data_source,extra_info\na,b,{'index': 1}\n", "extra_info: not valid JSON"),
        ("prompt,data_source,extra_info,extra_info.index\na,b,x,1\n", "do not go together"),
        (b"prompt,data_source\n\xff,b\n", "a.csv:2: not UTF-8"),
        ("question,data_source\na,b\n", "prompt: missing"),
    ],
)
def test_tables_that_are_none(tmp_path: Path, content: str | bytes, words: str) -> None:
    (tmp_path / "a.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert words in refusal(tmp_path / "a.csv")


def test_packed_files(tmp_path: Path) -> None:
    for name, text in (("a.jsonl.gz", lines()), ("b.json.gz", json.dumps(ROWS)), ("c.json.gz", lines())):
        (tmp_path / name).write_bytes(gzip.compress(text.encode()))
        assert truths(tmp_path / name) == ["1", "2", "3"]
    (tmp_path / "d.csv.gz").write_bytes(gzip.compress(TABLE.encode()))
    assert truths(tmp_path / "d.csv.gz") == ["1", "2"]
    for broken in (b"no gzip", gzip.compress(lines().encode())[:-20], b"\x1f\x8b\x08"):
        (tmp_path / "e.jsonl.gz").write_bytes(broken)
        assert "not a readable gzip file" in refusal(tmp_path / "e.jsonl.gz")


def test_globs_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place in ("many", "split/train", "split/test", "flat", "none", "other"):
        Path(place).mkdir(parents=True)
    for number, name in enumerate(("many/b.jsonl", "many/a.jsonl", "split/train/x.jsonl", "split/test/x.jsonl", "flat/train-0.jsonl",
                                   "flat/train-1.jsonl", "flat/validation.jsonl", "flat/test.jsonl", "other/extra.jsonl")):  # fmt: skip
        Path(name).write_text(lines([{**ROWS[0], "reward_model": {"ground_truth": str(number)}}]))
    Path("many/readme.txt").write_text("x")
    Path("many/.hidden.jsonl").write_text("x")
    assert truths("many/*.jsonl") == truths("many") == truths("many/*") == ["1", "0"]
    assert truths("many/[a]*.jsonl") == ["1"] and truths("**/extra.jsonl") == ["8"]
    assert truths("split", split=Split.TRAIN) == ["2"] and truths("split", split=Split.EVAL) == ["3"]
    assert truths("flat", split=Split.TRAIN) == ["4", "5"] and truths("flat", split=Split.EVAL) == ["7"]
    assert "has the splits test, train, validation: name the files of one" in refusal("flat")
    assert "no data file matches" in refusal("many/*.parquet") and "without data files" in refusal("none")
    assert "given twice" in refusal("many", "many/a.jsonl")
    Path("odd[1].jsonl").write_text(lines())
    assert len(truths("odd[1].jsonl")) == 3


def test_saved_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(ROWS)
    made.save_to_disk(str(tmp_path / "one"), num_shards=2)
    both = datasets.DatasetDict({"train": made, "test": made.select([2, 0])})
    both.save_to_disk(str(tmp_path / "both"))
    assert truths(tmp_path / "one") == ["1", "2", "3"]
    assert truths(tmp_path / "both", split=Split.TRAIN) == ["1", "2", "3"]
    assert truths(tmp_path / "both", split=Split.EVAL) == truths(tmp_path / "both" / "test") == ["3", "1"]
    assert "has the splits train, test" in refusal(tmp_path / "both")
    ids = [
        {sample.id for sample in load_samples([tmp_path / "both"], split=split, prompt_key="prompt")} for split in Split
    ]
    assert not ids[0] & ids[1] and "train/data-00000-of-00001.arrow:0" in ids[0]
    for folder, content in (("one", {"_data_files": [{"filename": "../both/x.arrow"}]}), ("one", {}), ("one", [1])):
        (tmp_path / folder / "state.json").write_text(json.dumps(content))
        assert "names no data files" in refusal(tmp_path / folder)
    (tmp_path / "one" / "state.json").write_text("{")
    assert "not valid JSON" in refusal(tmp_path / "one")
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["../one", "train/../../one"]}')
    assert "has the splits" in refusal(tmp_path / "both", split=Split.TRAIN)


def test_arrow_files_of_both_kinds(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    for name, write in (("stream.arrow", pa.ipc.new_stream), ("file.arrow", pa.ipc.new_file)):
        with write(str(tmp_path / name), table.schema) as out:
            out.write_table(table)
        assert truths(tmp_path / name) == ["1", "2", "3"]
    (tmp_path / "junk.arrow").write_bytes(os.urandom(400))
    assert "not a readable Arrow file" in refusal(tmp_path / "junk.arrow")


def test_addresses_are_named_as_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "data").mkdir()
    for name in ("hf://somewhere", "hf://datasets/owner", "hf://models/a/b", "hf:/datasets/a/b"):
        assert f"{name}: a dataset of the hub is hf://datasets/OWNER/NAME" in refusal(name)
    for name in ("https://host/a.parquet", "s3://bucket/a.jsonl"):
        assert f"{name}: addresses are not read" in refusal(name)
    assert "does not exist" in refusal("owner/name.parquet") and "known are" in refusal("data/trian")
    assert is_on_the_hub("owner/name") and is_on_the_hub("hf://datasets/owner/name/train.parquet")
    assert not is_on_the_hub("data/name") and not is_on_the_hub("a/b.jsonl") and not is_on_the_hub("train.jsonl")
    config = configure("task=null", "data.train_files=[owner/name]", "data.eval_files=['hf://datasets/owner/name']")
    assert reaches(config, tmp_path) == ["data.train_files=owner/name", "data.eval_files=hf://datasets/owner/name"]


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as its client needs for a dataset."""

    files: ClassVar[dict[str, bytes]] = {}
    commit = "0" * 39 + "1"

    def do_GET(self) -> None:
        if self.path.startswith("/api/datasets/owner/name"):
            siblings = [{"rfilename": name} for name in self.files]
            return self.answer(json.dumps({"id": "owner/name", "sha": self.commit, "siblings": siblings}).encode())
        name = self.path.partition(f"/resolve/{'main' if '/main/' in self.path else self.commit}/")[2]
        self.answer(self.files.get(name))

    do_HEAD = do_GET

    def answer(self, content: bytes | None) -> None:
        self.send_response(404 if content is None else 200)
        self.send_header("Content-Length", str(len(content or b"")))
        self.send_header("X-Repo-Commit", self.commit)
        self.send_header("ETag", f'"{len(content or b"")}"')
        if content is None:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content or b"")

    def log_message(self, *_: object) -> None:
        pass


ASK = """
import sys
from turnwise.data.files import Split
from turnwise.data.loader import load_samples
from turnwise.errors import TurnwiseError
for name in sys.argv[1:]:
    try:
        print([one.ground_truth for one in load_samples([name], split=Split.TRAIN, prompt_key="prompt")])
    except TurnwiseError as error:
        print(error)
"""


def ask(endpoint: str, home: Path, *names: str) -> list[str]:
    """By the real client, which reads its environment when it is imported."""
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", ASK, *names], env=environment, capture_output=True, text=True, cwd=home
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_datasets_of_the_hub_are_fetched_once_and_serve_offline(tmp_path: Path) -> None:
    for split, rows in (("train", ROWS), ("test", ROWS[:1])):
        write_rows(rows, tmp_path / f"{split}.parquet")
        Hub.files[f"data/{split}-00000-of-00001.parquet"] = (tmp_path / f"{split}.parquet").read_bytes()
        Hub.files[f"socratic/{split}.parquet"] = Hub.files[f"main/{split}.parquet"] = b"never fetched"
    Hub.files["README.md"] = b"#"
    names = ("owner/name", "hf://datasets/owner/name/data/train-*", "hf://datasets/owner/name/data/test-*.parquet", "hf://datasets/owner/name/none.jsonl", "other/name", "hf://datasets/owner/name")  # fmt: skip
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = ask(f"http://127.0.0.1:{server.server_port}", tmp_path, *names)
        server.shutdown()
    assert "owner/name: has data, main, socratic: name one, as hf://datasets/owner/name/data/*" in found[0]
    assert "hf://datasets/owner/name: has data, main, socratic" in found[5]
    assert found[1:3] == ["['1', '2', '3']", "['1']"]
    assert "no such data file on the hub; it has data/train" in found[3]
    assert "hf://datasets/other/name: is not here, not in the cache, and the hub does not give it" in found[4]
    gone = ask("http://127.0.0.1:1", tmp_path, "owner/name", "hf://datasets/owner/other")
    assert gone[0] == "['1', '2', '3']" and "hf://datasets/owner/other: is not here, not in the cache" in gone[1]


def test_a_file_is_named_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines())
    assert data_files([tmp_path / "a.jsonl"]) == [tmp_path / "a.jsonl"]
    assert [row.number for row in read_rows(tmp_path / "a.jsonl")] == [0, 1, 2]
