"""Where a model comes from: names, folders, GGUF files and a hub that is a local server with the real client."""

import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from turnwise.commands.cli import main
from turnwise.engines.model.hub import is_hub_id
from turnwise.engines.model.sources import find_model
from turnwise.errors import ConfigError

TINY = find_model("tiny").folder


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused(*args: str) -> str:
    """The one line a command is refused with."""
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        code = main(args)
    assert code == 2, err.getvalue()
    (line,) = [text for text in err.getvalue().splitlines() if text]
    assert not list(Path().glob("runs*"))
    return line


# --- on this machine ------------------------------------------------------------------------------------------------


def test_a_bundled_name_a_folder_and_a_file() -> None:
    assert find_model("tiny").base == str(TINY.resolve()) and find_model("tiny").weight_bytes > 1e6
    folder = find_model(str(TINY))
    assert (folder.path, folder.gguf_file, folder.on_hub) == (TINY, None, False)
    Path("sub").mkdir()
    Path("sub/a.GGUF").write_bytes(b"12345")
    file = find_model("sub/a.GGUF")
    assert (file.folder, file.gguf_file, file.weight_bytes) == (Path("sub"), "a.GGUF", 5)
    assert file.base == str(Path("sub/a.GGUF").resolve())


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("tinny", "no such folder or bundled model: 'tinny': did you mean 'tiny'?"),
        ("qwen", "bundled models: tiny, tiny_vision; a hub id is OWNER/NAME"),
        ("/no/such/folder", "no such folder: /no/such/folder"),
        ("./no/folder", "no such folder: ./no/folder"),
        ("a/b/c", "no such folder: a/b/c"),
        ("models/small.gguf", "no such GGUF file: models/small.gguf"),
        ("small.gguf", "no such GGUF file: small.gguf"),
        ("x" * 300, "cannot be looked up"),
        ("~nobody-is-called-that/x", "cannot be looked up"),
    ],
)
def test_what_is_not_there_is_told_by_what_it_looks_like(path: str, said: str) -> None:
    for verb in ("eval", "train"):
        line = refused(verb, f"model.path='{path}'")
        assert said in line and line.startswith(f"turnwise {verb}: model.path: ")


def test_folders_and_files_that_are_no_models_say_what_they_are() -> None:
    Path("g").mkdir()
    Path("g/small.gguf").touch()
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").touch()
    Path("above/policy").mkdir(parents=True)
    Path("above/policy/config.json").write_text("{}")
    Path("pickled").mkdir()
    Path("pickled/pytorch_model.bin").touch()
    Path("model.safetensors").touch()
    for path, said in {
        "g": "name its GGUF file: model.path=g/small.gguf",
        "adapter": "not an adapter",
        "above": "above/policy is one",
        "pickled": "pytorch_model.bin is a pickle",
        "model.safetensors": "is a file; give the Hugging Face folder",
    }.items():
        with pytest.raises(ConfigError, match=r"model\.path: ") as found:
            find_model(path)
        assert said in str(found.value)
    Path("pickled/config.json").write_bytes((TINY / "config.json").read_bytes())
    assert "pytorch_model.bin is a pickle, which runs code when it is opened" in refused("eval", "model.path=pickled")


def test_what_a_hub_id_is() -> None:
    for path in ("org/name", "org/name@main", "Qwen/Qwen3-0.6B", "a/b@refs/pr/3", "a/b@0123abc"):
        assert is_hub_id(path), path
    for path in ("name", "/org/name", "./a/b", "~/a", "a/b/c", "a/b.gguf", "a/b@", "../b", "a/b@/x", "a b/c", "a/\0"):
        assert not is_hub_id(path), path


def test_a_run_that_names_code_or_a_hub_model_is_not_trusted_for_it() -> None:
    from turnwise.data.task_config import configure
    from turnwise.training.runs.trust import reaches

    assert reaches(configure(), Path()) == []
    found = reaches(configure("model.trust_remote_code=true"), Path())
    assert found == ["model.trust_remote_code=true, for model.path=tiny"]
    assert reaches(configure("model.path=org/name@v1"), Path()) == ["model.path=org/name@v1"]


# --- on the hub -----------------------------------------------------------------------------------------------------


class Hub(BaseHTTPRequestHandler):
    """As much of a hub as the client asks for: models by name, each with one commit."""

    models: ClassVar[dict[str, dict[str, bytes]]] = {}
    asked: ClassVar[list[str]] = []
    commit = "0123456789abcdef0123456789abcdef01234567"

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        self.asked.append(self.path)
        found, error = self.found()
        self.send_response(404 if found is None else 200)
        self.send_header("Content-Length", str(len(found or b"")))
        if found is not None:
            self.send_header("X-Repo-Commit", self.commit)
            self.send_header("ETag", hashlib.sha256(found).hexdigest())
        elif error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if with_body:
            self.wfile.write(found or b"")

    def found(self) -> tuple[bytes | None, str | None]:
        for name, files in self.models.items():
            api, _, rest = self.path.partition(f"/api/models/{name}")
            if (not api and rest.startswith(("/revision/", "?"))) or (not api and rest == "" and name in self.path):
                if "/revision/" in rest and rest.split("/revision/")[1].split("?")[0] not in (
                    "main",
                    "v1",
                    self.commit,
                ):
                    return None, "RevisionNotFound"
                listed = [{"rfilename": file} for file in files]
                return json.dumps({"id": name, "sha": self.commit, "siblings": listed}).encode(), None
            if not api and rest.startswith("/tree/"):
                entries = [
                    {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for file, content in files.items()
                ]
                return json.dumps(entries).encode(), None
            place, _, file = self.path.partition(f"/resolve/{self.commit}/")
            if place == f"/{name}":
                return files.get(file), "EntryNotFound"
        return None, "RepoNotFound"

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    files = {path.name: path.read_bytes() for path in TINY.iterdir() if path.is_file() and path.suffix != ".py"}
    others = {"modeling_x.py": b"raise SystemExit('this ran')", "original/consolidated.safetensors": b"not asked for"}
    Hub.models = {
        "org/good": files | others,
        "org/pickled": {"config.json": files["config.json"], "pytorch_model.bin": b"pickle"},
        "org/packed": {"README.md": b"", "small.Q4_K_M.gguf": b"GGUF"},
    }
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


ASK = """
import sys
from turnwise.engines.model.sources import find_model
from turnwise.errors import TurnwiseError
for name in sys.argv[1:]:
    try:
        print(find_model(name).folder)
    except TurnwiseError as error:
        print(error)
"""


def ask(endpoint: str, home: Path, *names: str) -> tuple[list[str], str]:
    """(an answer for each name, what was drawn), by the real client, which reads its environment when it is imported."""
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, "-c", ASK, *names], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_the_hub_gives_safetensors_with_a_bar_once_and_serves_from_the_cache(hub: str, tmp_path: Path) -> None:
    names = ("org/good", "org/good@v1", "org/good@nope", "org/pickled", "org/packed", "org/missing")
    answers, drawn = ask(hub, tmp_path / "home", *names)
    folder = Path(answers[0])
    assert sorted(path.name for path in folder.iterdir()) == [
        "chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert (folder / "model.safetensors").read_bytes() == (TINY / "model.safetensors").read_bytes()
    assert "%|" in drawn, drawn
    assert answers[1] == answers[0]
    assert "has no revision nope" in answers[2]
    assert "only pickles such as pytorch_model.bin" in answers[3]
    assert "only GGUF files such as small.Q4_K_M.gguf" in answers[4]
    assert "the hub has no such model" in answers[5]
    assert not any("pytorch_model.bin" in path or "original" in path or path.endswith(".py") for path in Hub.asked)
    (again,), quiet = ask(hub, tmp_path / "home", "org/good")
    assert again == answers[0] and "%|" not in quiet
    gone = "http://127.0.0.1:1"  # nobody listens there
    (offline, lacking), quiet = ask(gone, tmp_path / "home", "org/good", "org/other")
    assert offline == answers[0] and "%|" not in quiet
    assert "it is not in the cache, and the hub cannot be reached" in lacking


def test_a_model_with_an_adapter_beside_it_is_refused(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "both")
    (tmp_path / "both" / "adapter_config.json").write_text('{"base_model_name_or_path": "other/model"}')
    with pytest.raises(ConfigError, match="holds a model and an adapter"):
        find_model(str(tmp_path / "both"))
