"""`turnwise serve` as a process: the address it prints, the key from a file, a signal; and what it refuses."""

import contextlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from turnwise.commands.cli import main
from turnwise.ext.serving.command import KEY_ENV

ROOT = Path(__file__).parent.parent.parent.parent


def test_it_serves_with_a_key_until_a_signal(tmp_path):
    (tmp_path / "key").write_text("secret\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    start = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "  # a parent may have us ignore it
    )
    start += "from turnwise.commands.cli import main; raise SystemExit(main())"
    words = [sys.executable, "-c", start, "serve", "tiny", "--port", "0", "--api-key-file", "key", "engine.threads=1"]
    with subprocess.Popen(words, cwd=tmp_path, env=environment, text=True, stderr=subprocess.PIPE) as running:
        assert running.stderr is not None
        line = ""
        while not line.startswith("serving tiny at "):
            line = running.stderr.readline()
            assert line, "it ended"
        url = line.split()[3]
        with httpx.Client(trust_env=False, timeout=60) as http:
            assert http.get(f"{url}/models").status_code == 401
            brought = {"authorization": "Bearer secret"}
            asked = {"model": "tiny", "messages": [{"role": "user", "content": "2+3?"}], "max_tokens": 4}
            answer = http.post(f"{url}/chat/completions", json=asked, headers=brought).json()
            assert answer["usage"]["completion_tokens"] <= 4 and "secret" not in line
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 128 + signal.SIGINT
        assert "Traceback" not in running.stderr.read()


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["tiny", "--host", "0.0.0.0"], "give it a token in TURNWISE_API_KEY or with --api-key-file"),
        (["tiny", "--port", "70000"], "--port 70000"),
        (["tiny", "--api-key-file", "nowhere"], "--api-key-file nowhere: No such file"),
        (["tiny", "--api-key-file", "empty"], "not empty"),
        (["tiyn"], "no such folder or bundled model: 'tiyn'"),
        (["tiny", "engine=openai", "engine.base_url=http://127.0.0.1:1/v1"], "engine=openai is an endpoint already"),
        (["tiny", "--api-key", "secret"], "--api-key"),
    ],
)
def test_mistakes_are_one_line(args, problem, monkeypatch):
    monkeypatch.delenv(KEY_ENV, raising=False)
    Path("empty").touch()
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        code = main(["serve", *args])
    assert code == 2 and problem in err.getvalue() and len(err.getvalue().splitlines()) == 1, err.getvalue()
