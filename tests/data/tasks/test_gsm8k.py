"""GSM8K rows: verl's shape with its gaps closed, from self-written rows and, where present, the real data."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from turnwise.data.lint import lint
from turnwise.data.loader import load_samples
from turnwise.data.tasks.gsm8k import TOOLS, Flavour, ground_truth, prepare, rows
from turnwise.data.write import write_rows
from turnwise.errors import ConfigError, DataError
from turnwise.types import InteractionSpec, Role

REAL = Path(os.environ.get("TURNWISE_GSM8K", Path(__file__).parents[4] / "shared" / "data" / "gsm8k"))
OWN = [
    ("Mia bakes 3 trays of 12 rolls. How many rolls is that?", "3 trays of 12 are 3 * 12 = <<3*12=36>>36.\n#### 36"),
    ("A barn holds 2,000 bales; 500 are sold. How many stay?", "2,000 - 500 = <<2000-500=1500>>1,500\n#### 1,500"),
    ("It is 4 degrees and gets 9 colder. How warm is it?", "4 - 9 = <<4-9=-5>>-5\n#### -5"),
    ("Two friends share 5 dollars. How much does each get?", "5 / 2 = <<5/2=2.5>>2.5\n#### 2.5"),
    ("Zoë’s café sells 7 teas at €3. What is earned?", "7 * 3 = <<7*3=21>>21\n####21 "),
    ("Tom has 1 cat. How many cats has Tom?", "He has 1.\n#### 1"),
]
TRUTHS = ["36", "1500", "-5", "2.5", "21", "1"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    made = [{"question": question, "answer": answer} for question, answer in OWN]
    write_rows(made[:4], folder / "train.jsonl")
    write_rows(made[4:], folder / "test.jsonl")
    return folder


def made(split: str, source: Path, flavour: Flavour, interaction: str | None = None) -> list[dict[str, Any]]:
    return list(rows(split, str(source), flavour, interaction))


def test_plain_rows_have_verls_shape(source: Path) -> None:
    first = made("train", source, Flavour.PLAIN)[0]
    question, answer = OWN[0]
    assert {key: value for key, value in first.items() if key != "prompt"} == {
        "data_source": "openai/gsm8k",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "36"},
        "extra_info": {"split": "train", "index": 0, "answer": answer, "question": question},
    }
    (message,) = first["prompt"]
    assert message["role"] == "user"
    assert message["content"].startswith(question)
    assert "####" in message["content"]


def test_ground_truths_follow_the_mark(source: Path) -> None:
    both = made("train", source, Flavour.PLAIN) + made("test", source, Flavour.PLAIN)
    assert [row["reward_model"]["ground_truth"] for row in both] == TRUTHS
    assert [row["extra_info"]["index"] for row in both] == [0, 1, 2, 3, 0, 1]
    assert ground_truth("no mark") is None
    assert ground_truth("#### \n") is None


@pytest.mark.parametrize("flavour", list(Flavour))
def test_prepared_files_load_as_the_flavour_says(source: Path, tmp_path: Path, flavour: Flavour) -> None:
    written = prepare(tmp_path / "out", source=str(source), flavour=flavour)
    files = {split: tmp_path / "out" / f"{split}.parquet" for split in ("train", "test")}
    assert written == {files["train"]: 4, files["test"]: 2}
    assert lint(files.values(), prompt_key="prompt").findings == []
    for split, path in files.items():
        for index, sample in enumerate(load_samples([path], prompt_key="prompt")):
            question, _ = OWN[index + (4 if split == "test" else 0)]
            truth = TRUTHS[index + (4 if split == "test" else 0)]
            kwargs = {"query": question, "ground_truth": truth}
            assert sample.ground_truth == truth
            assert sample.agent == (None if flavour is Flavour.PLAIN else "tool_agent")
            assert sample.tools == (TOOLS if flavour.has_tools else None)
            assert sample.interaction == (InteractionSpec("gsm8k", kwargs) if flavour.has_interaction else None)
            assert [message.role for message in sample.prompt][-1] is Role.USER
            assert ("tools" in sample.prompt[0].text) == flavour.has_tools


def test_the_interaction_can_be_chosen(source: Path) -> None:
    first = made("test", source, Flavour.TOOL_INTERACTION, "code_verify")[0]
    assert first["extra_info"]["interaction_kwargs"]["name"] == "code_verify"
    assert first["extra_info"]["need_tools_kwargs"] is False
    assert first["extra_info"]["tools_kwargs"].keys() == set(TOOLS)
    for flavour in (Flavour.PLAIN, Flavour.TOOL):
        with pytest.raises(ConfigError, match="has no interaction: leave 'code_verify' out"):
            made("test", source, flavour, "code_verify")
    with pytest.raises(ConfigError, match="empty"):
        made("test", source, Flavour.INTERACTION, " ")


def test_parquet_sources_and_downloaded_copies(source: Path, tmp_path: Path) -> None:
    wanted = made("train", source, Flavour.PLAIN)
    raw = [json.loads(line) for line in (source / "train.jsonl").read_text().splitlines()]
    write_rows(raw, tmp_path / "whole" / "train.parquet")
    assert made("train", tmp_path / "whole", Flavour.PLAIN) == wanted
    write_rows(raw[:3], tmp_path / "copy" / "main" / "train-00000-of-00002.parquet")
    write_rows(raw[3:], tmp_path / "copy" / "main" / "train-00001-of-00002.parquet")
    assert made("train", tmp_path / "copy", Flavour.PLAIN) == wanted


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"question": "q", "answer": "41"}, "train.jsonl row 1: answer: no number after ####"),
        ({"question": "q", "answer": "#### "}, "train.jsonl row 1: answer: no number after ####"),
        ({"question": "q", "answer": None}, "train.jsonl row 1: answer: expected text"),
        ({"question": 3, "answer": "#### 1"}, "train.jsonl row 1: question: expected text"),
        ({"qestion": "q", "answer": "#### 1"}, "question: expected text: did you mean 'qestion'?"),
    ],
)
def test_bad_source_rows_are_named_and_nothing_is_written(
    source: Path, tmp_path: Path, values: dict[str, Any], text: str
) -> None:
    lines = [{"question": "q", "answer": "#### 1"}, values]
    (source / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(DataError) as caught:
        prepare(tmp_path / "out", source=str(source))
    assert text in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_sources_that_are_not_there(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for wrong, text in [
        (str(tmp_path / "no"), "no such folder, and not a hub id"),
        ("../x", "no such folder, and not a hub id"),
        ("", "no such folder, and not a hub id"),
        ("a\0/b", "no such folder, and not a hub id"),
        (str(source / "train.jsonl"), "is a file; give the folder"),
        (str(tmp_path), "holds neither train.jsonl nor train.parquet"),
    ]:
        with pytest.raises(DataError, match=text):
            prepare(tmp_path / "out", source=wrong)
    with pytest.raises(DataError, match="unknown split of gsm8k 'tset': did you mean 'test'"):
        made("tset", source, Flavour.PLAIN)


def test_a_source_is_never_overwritten_nor_guessed(source: Path) -> None:
    with pytest.raises(DataError, match="is the source itself"):
        prepare(source / ".." / "source", source=str(source))
    (source / "train.parquet").touch()
    with pytest.raises(DataError, match=r"holds train.jsonl and train.parquet"):
        made("train", source, Flavour.PLAIN)


class Hub(BaseHTTPRequestHandler):
    """As much of a hub as the client asks for: one data set with one commit."""

    files: ClassVar[dict[str, bytes]] = {}
    commit = "0123456789abcdef0123456789abcdef01234567"

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        place, _, name = self.path.partition(f"/resolve/{self.commit}/")
        if self.path.startswith("/api/datasets/openai/gsm8k/revision/"):
            listed: list[dict[str, Any]] = [{"rfilename": file} for file in self.files]
            found: bytes | None = json.dumps({"id": "openai/gsm8k", "sha": self.commit, "siblings": listed}).encode()
        elif self.path.startswith(f"/api/datasets/openai/gsm8k/tree/{self.commit}"):
            listed = [{"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                      for file, content in self.files.items()]  # fmt: skip
            found = json.dumps(listed).encode()
        else:
            found = self.files.get(name) if place == "/datasets/openai/gsm8k" else None
        self.send_response(404 if found is None else 200)
        self.send_header("Content-Length", str(len(found or b"")))
        if found is not None:
            self.send_header("X-Repo-Commit", self.commit)
            self.send_header("ETag", hashlib.sha256(found).hexdigest())
        self.end_headers()
        if with_body:
            self.wfile.write(found or b"")

    def log_message(self, *_: object) -> None:
        pass


def prepare_from(endpoint: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """The command as a user runs it, with the real client; it reads its environment when it is imported."""
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "turnwise.commands.cli", "prepare", "gsm8k", "--out", "out"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_the_hub_gives_the_parquet_files_and_out_of_reach_points_to_a_folder(source: Path, tmp_path: Path) -> None:
    for split in ("train", "test"):
        raw = [json.loads(line) for line in (source / f"{split}.jsonl").read_text().splitlines()]
        part = tmp_path / "hub" / f"{split}-00000-of-00001.parquet"
        write_rows(raw, part)
        Hub.files[f"main/{part.name}"] = part.read_bytes()
        Hub.files[f"socratic/{part.name}"] = b"not asked for"
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done = prepare_from(f"http://127.0.0.1:{server.server_port}", tmp_path)
        server.shutdown()
    assert done.returncode == 0, done.stderr
    assert "train.parquet (4 rows)" in done.stdout and "test.parquet (2 rows)" in done.stdout
    read = [sample.ground_truth for sample in load_samples([tmp_path / "out" / "test.parquet"], prompt_key="prompt")]
    assert read == TRUTHS[4:]
    (tmp_path / "elsewhere").mkdir()
    gone = prepare_from(f"http://127.0.0.1:{server.server_port}", tmp_path / "elsewhere")
    assert gone.returncode == 2 and len(gone.stderr.strip().splitlines()) == 1, gone.stderr
    assert "'openai/gsm8k' is not a folder here, and the hub does not give it" in gone.stderr
    assert "--source the folder" in gone.stderr and not (tmp_path / "elsewhere" / "out").exists()


@pytest.mark.skipif(not (REAL / "train.jsonl").is_file(), reason="the real GSM8K files are not here")
def test_the_real_data(tmp_path: Path) -> None:
    written = prepare(tmp_path, source=str(REAL), flavour=Flavour.TOOL_INTERACTION, interaction="code_verify")
    assert list(written.values()) == [7473, 1319]
    samples = load_samples([tmp_path / "test.parquet"], prompt_key="prompt")
    assert samples[0].ground_truth == "18"
    assert samples[0].interaction is not None
    assert all(float(sample.ground_truth) is not None for sample in samples)
    assert lint([tmp_path / "test.parquet"], prompt_key="prompt").errors == 0
