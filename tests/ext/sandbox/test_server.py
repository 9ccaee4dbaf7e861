"""The sandbox server over real HTTP, with a real pool behind it."""

import asyncio
import base64
import concurrent.futures
import contextlib
import socket
import time

import httpx
import pytest

from turnwise.errors import ConfigError
from turnwise.ext.sandbox.limits import MIB, Limits
from turnwise.ext.sandbox.pool import PoolSettings, SandboxPool
from turnwise.ext.sandbox.server import MOST_BODIES, ServerSettings, make_app, serve

TOKEN = "a-token-for-tests"
JSON = {"Content-Type": "application/json"}
POOL = PoolSettings(preload=("numpy",), warm=2, limits=Limits(output=20_000))


@pytest.fixture(scope="module")
def start_server(serving_in_a_thread):
    """Starts a server with a pool of its own; a client with its token."""

    @contextlib.contextmanager
    def start(settings, token=TOKEN):
        @contextlib.asynccontextmanager
        async def open_app():
            async with SandboxPool(settings.pool) as pool:
                yield make_app(pool, token, settings)

        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        with serving_in_a_thread(open_app) as url, httpx.Client(base_url=url, headers=headers, timeout=60) as client:
            yield client

    return start


@pytest.fixture(scope="module")
def client(start_server):
    with start_server(ServerSettings(pool=POOL, body=2 * MIB, seconds=20)) as client:
        yield client


def run_code(client, code, **more):
    # What verl's reward code and SandboxFusionTool send.
    request = {
        "compile_timeout": 10,
        "run_timeout": 10,
        "code": code,
        "stdin": "",
        "memory_limit_MB": 1024,
        "language": "python",
        "files": {},
        "fetch_files": [],
    }
    response = client.post("/run_code", json={**request, **more})
    assert response.status_code == 200
    return response.json()


def test_a_script_prints_what_it_prints_and_not_its_last_value(client):
    answer = run_code(client, "print(6 * 7)\n43")
    assert answer["status"] == "Success"
    assert answer["message"] == ""
    assert answer["compile_result"] is None
    assert answer["run_result"]["status"] == "Finished"
    assert answer["run_result"]["return_code"] == 0
    assert answer["run_result"]["stdout"] == "42\n"
    assert answer["run_result"]["stderr"] == ""
    assert answer["run_result"]["execution_time"] > 0
    assert set(answer) == {"status", "message", "compile_result", "run_result", "executor_pod_name", "files"}


def test_nobody_asks_a_script_for_its_last_value(client):
    answer = run_code(client, "class Shy:\n    def __repr__(self):\n        raise ValueError\nShy()")
    assert answer["status"] == "Success"


def test_an_exception_is_a_finished_run_with_the_traceback_in_stderr(client):
    answer = run_code(client, "print('before')\ndef f():\n    return 1 / 0\nf()")
    assert (answer["status"], answer["run_result"]["status"], answer["run_result"]["return_code"]) == (
        "Failed",
        "Finished",
        1,
    )
    assert answer["run_result"]["stdout"] == "before\n"
    assert answer["run_result"]["stderr"].endswith("ZeroDivisionError: division by zero\n")
    assert "line 3, in f" in answer["run_result"]["stderr"]


@pytest.mark.parametrize(
    ("code", "return_code", "stderr"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("raise SystemExit", 0, ""),
        ("import sys; sys.exit('no good')", 1, "no good\n"),
        ("if True print(1)", 1, None),
        ("import os; os.abort()", -9, None),
    ],
)
def test_exit_statuses(client, code, return_code, stderr):
    answer = run_code(client, code)
    assert answer["run_result"]["status"] == "Finished"
    assert answer["run_result"]["return_code"] == return_code
    assert answer["status"] == ("Success" if return_code == 0 else "Failed")
    assert stderr is None or answer["run_result"]["stderr"] == stderr


def test_a_timeout_keeps_the_output_so_far(client):
    answer = run_code(client, "print('so far')\nwhile True: pass", run_timeout=0.3)
    assert (answer["status"], answer["run_result"]["status"]) == ("Failed", "TimeLimitExceeded")
    assert answer["run_result"]["stdout"] == "so far\n"
    assert answer["run_result"]["return_code"] is None


STDIN_READERS = {
    "input": "a, b = input().split()\nprint(int(a) + int(b))\nprint(input())",
    "lines": "import sys\nfirst, second = [line.strip() for line in sys.stdin]\nprint(sum(map(int, first.split())))\nprint(second)",
    "buffer": "import sys\na, b, c = sys.stdin.buffer.read().decode().split()\nprint(int(a) + int(b))\nprint(c)",
    "descriptor": "a, b, c = open(0).read().split()\nprint(int(a) + int(b))\nprint(c)",
    "future": "from __future__ import annotations\nprint(sum(map(int, input().split())))\nprint(input())",
}


@pytest.mark.parametrize("reader", STDIN_READERS)
def test_standard_input_can_be_read_in_every_usual_way(client, reader):
    answer = run_code(client, STDIN_READERS[reader], stdin="3 4\nübung\n")
    assert answer["run_result"]["stderr"] == ""
    assert answer["run_result"]["stdout"] == "7\nübung\n"


def test_standard_input_ends_and_may_be_long_and_may_be_replaced(client):
    answer = run_code(client, "input(); input()", stdin="one line\n")
    assert answer["run_result"]["stderr"].endswith("EOFError: EOF when reading a line\n")
    long = "7\n" * 400_000
    assert (
        run_code(client, "import sys; print(sum(map(int, sys.stdin)))", stdin=long)["run_result"]["stdout"]
        == "2800000\n"
    )
    code = "import sys, io\nsys.stdin = io.StringIO('mine')\nprint(input())"
    assert run_code(client, code, stdin="theirs")["run_result"]["stdout"] == "mine\n"


def test_nothing_of_the_machinery_is_seen_by_the_script(client):
    code = "import os\nprint(sorted(n for n in globals() if not n.startswith('__')), os.listdir('.'), __name__)"
    assert run_code(client, code, stdin="x")["run_result"]["stdout"] == "['os', 'show'] [] __main__\n"


def test_files_go_in_and_come_out(client):
    content = bytes(range(256)) * 4000
    code = "import os\ndata = open('in/data.bin', 'rb').read()\nos.mkdir('out')\nos.chdir('out')\nopen('back', 'wb').write(data[::-1])"
    files = {"in/data.bin": base64.b64encode(content).decode(), "nothing": None}
    answer = run_code(client, code, files=files, fetch_files=["out/back", "missing", "in"])
    assert answer["run_result"]["stderr"] == ""
    assert list(answer["files"]) == ["out/back"]
    assert base64.b64decode(answer["files"]["out/back"]) == content[::-1]


def test_a_file_outside_is_neither_written_nor_fetched(client):
    answer = run_code(client, "print(1)", files={"/etc/evil": ""})
    assert answer["status"] == "SandboxError"
    assert "/etc/evil" in answer["message"]
    assert answer["run_result"] is None
    assert run_code(client, "print(1)", fetch_files=["/etc/shadow", "../../etc/passwd"])["files"] == {}


def test_a_pipe_to_fetch_does_not_hang_the_server(client):
    answer = run_code(client, "import os\nos.mkfifo('p') if hasattr(os, 'mkfifo') else None", fetch_files=["p"])
    assert answer["files"] == {}


def test_output_that_was_cut_is_said_to_be_cut(client):
    answer = run_code(client, "print('x' * 50_000)")
    assert answer["message"] == "stdout was cut to 20000 characters"
    assert len(answer["run_result"]["stdout"]) < 21_000


def test_a_memory_limit_can_be_lowered_but_not_raised(client):
    code = "data = bytearray(200 * 2**20)\nfor i in range(0, len(data), 4096): data[i] = 1\nprint(len(data))"
    assert run_code(client, code)["status"] == "Success"
    lowered = run_code(client, code, memory_limit_MB=100)
    assert (lowered["status"], lowered["run_result"]["return_code"]) == ("Failed", 1)
    assert "MemoryError" in lowered["run_result"]["stderr"]
    raised = run_code(client, "bytearray(700 * 2**20)", memory_limit_MB=8000)
    assert "MemoryError" in raised["run_result"]["stderr"]


def test_other_languages_are_refused_in_words(client):
    answer = run_code(client, "int main() {}", language="cpp")
    assert answer["status"] == "SandboxError"
    assert "Python only, not 'cpp'" in answer["message"]


def test_cells_share_their_state_and_an_exception_ends_only_its_cell(client):
    cells = ["a = 123", "a", "print(a)", "import sys; sys.stderr.write('oh')", "raise RuntimeError('bad')", "a + 1"]
    answer = client.post("/run_jupyter", json={"cells": cells, "total_timeout": 20}).json()
    assert answer["status"] == "Success"
    assert answer["driver"]["status"] == "Finished"
    assert [cell["stdout"] for cell in answer["cells"]] == ["", "", "123\n", "", "", ""]
    assert answer["cells"][1]["display"] == [{"text/plain": "123"}]
    assert answer["cells"][3]["stderr"] == "oh"
    assert (answer["cells"][4]["error"][0]["ename"], answer["cells"][4]["error"][0]["evalue"]) == (
        "RuntimeError",
        "bad",
    )
    assert answer["cells"][5]["display"] == [{"text/plain": "124"}]


def test_a_notebook_stops_at_its_time_limit(client):
    answer = client.post(
        "/run_jupyter", json={"cells": ["print(1)", "while True: pass", "print(2)"], "cell_timeout": 0.3}
    ).json()
    assert (answer["status"], answer["driver"]["status"]) == ("Failed", "TimeLimitExceeded")
    assert len(answer["cells"]) == 2
    assert answer["cells"][0]["stdout"] == "1\n"


def test_requests_do_not_see_each_other(client):
    assert run_code(client, "secret = 1; open('f', 'w').write('x')")["status"] == "Success"
    answer = run_code(client, "import os; print(os.listdir('.')); secret")
    assert answer["run_result"]["stdout"] == "[]\n"
    assert "NameError" in answer["run_result"]["stderr"]


def test_64_requests_at_once_are_not_mixed_up(client):
    def one(number):
        return run_code(client, "print(int(input()) * 1000 + int(input()))", stdin=f"{number}\n{number + 1}\n")

    with concurrent.futures.ThreadPoolExecutor(64) as threads:
        answers = list(threads.map(one, range(64)))
    assert [answer["run_result"]["stdout"] for answer in answers] == [f"{n * 1000 + n + 1}\n" for n in range(64)]


@pytest.mark.parametrize(
    "header", [None, "Bearer wrong", f"Bearer {TOKEN}x", TOKEN, "Bearer", "Basic !!", "Bearer \xff"]
)
def test_nothing_without_the_token(client, header):
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    bare = httpx.Client(base_url=client.base_url)
    with bare:
        for method, path in [
            ("POST", "/run_code"),
            ("POST", "/sessions"),
            ("GET", "/report"),
            ("DELETE", "/sessions/x"),
        ]:
            assert bare.request(method, path, headers=headers).status_code == 401
        assert bare.get("/health").json() == {"status": "ok"}


def test_the_token_may_stand_in_the_url_for_clients_that_know_nothing_else(client):
    url = client.base_url.copy_with(username="any", password=TOKEN)
    answer = httpx.post(f"{url}/run_code", json={"code": "print(1)", "language": "python"})
    assert answer.json()["run_result"]["stdout"] == "1\n"


def test_the_report_names_the_level_and_no_path_of_the_host(client):
    report = client.get("/report").json()
    assert report["level"] in ("L2", "L3", "L4")
    assert "blocked  read a file outside" in report["text"]
    assert "/" not in report["text"].replace("n/a", "")


def test_a_body_that_is_too_long_is_not_read(client):
    code = "x" * (3 * MIB)
    assert client.post("/run_code", json={"code": code, "language": "python"}).status_code == 413

    def pieces():
        for _ in range(1000):
            yield b"x" * 65536

    with contextlib.suppress(httpx.TransportError):  # the server may close before all is sent
        assert client.post("/run_code", content=pieces(), headers=JSON).status_code == 413
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"code": 1, "language": "python"}',
        b'{"code": "1", "language": "python", "run_timeout": NaN}',
        b'{"code": "1", "language": "python", "run_timeout": -1}',
        b'{"code": "1", "language": "python", "files": {"a": "not base64!"}}',
        b'{"code": "1", "language": "python", "stdin": "\\ud800"}',
        b'{"code": "1", "language": "python", "fetch_files": ["\\ud800"]}',
    ],
)
def test_nonsense_is_refused_without_an_echo_or_a_trace(client, body):
    response = client.post("/run_code", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 422
    assert "Traceback" not in response.text
    assert len(response.text) < 1000


def test_code_that_cannot_be_encoded_is_the_code_s_fault(client):
    answer = client.post(
        "/run_code",
        content=b'{"code": "print(\'\\ud800\')", "language": "python"}',
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == 200
    assert answer.json()["run_result"]["return_code"] == 1


def test_a_session_remembers_and_is_gone_when_closed(client):
    number = client.post("/sessions", json={"seed": 5}).json()["id"]
    assert client.post(f"/sessions/{number}/run", json={"code": "x = 20"}).json()["status"] == "ok"
    told = client.post(f"/sessions/{number}/run", json={"code": "x + 1", "seconds": 5}).json()
    assert (told["value"], told["kept"]) == ("21", True)
    assert client.delete(f"/sessions/{number}").status_code == 204
    assert client.post(f"/sessions/{number}/run", json={"code": "x"}).status_code == 404


def test_a_bad_image_is_refused_in_words(client):
    images = [{"name": "../up", "data": "eA=="}]
    response = client.post("/sessions", json={"images": images})
    assert response.status_code == 422
    assert "plain file name" in response.json()["detail"]


def test_sessions_expire_and_are_counted_but_not_while_they_run(start_server):
    settings = ServerSettings(pool=POOL, sessions=2, idle_seconds=0.4)
    with start_server(settings, token=None) as client:
        number, other = (client.post("/sessions", json={}).json()["id"] for _ in range(2))
        assert number != other
        assert len(number) >= 32
        full = client.post("/sessions", json={})
        assert full.status_code == 429
        assert full.headers["Retry-After"]
        told = client.post(f"/sessions/{number}/run", json={"code": "import time; time.sleep(1.5); 5"}).json()
        assert told["value"] == "5"  # longer than a session may be idle
        deadline = time.monotonic() + 20
        while client.post("/sessions", json={}).status_code == 429 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert client.post(f"/sessions/{other}/run", json={"code": "1"}).status_code == 404


def test_images_of_open_sessions_do_not_fill_the_memory(start_server):
    with start_server(ServerSettings(pool=POOL, body=1000), token=None) as client:
        image = {"name": "a", "data": base64.b64encode(bytes(600)).decode()}
        answers = [client.post("/sessions", json={"images": [image]}) for _ in range(30)]
        opened = [answer.json()["id"] for answer in answers if answer.status_code == 200]
        assert len(opened) == MOST_BODIES * 1000 // 600 and {answer.status_code for answer in answers} == {200, 429}
        assert client.post("/sessions", json={}).status_code == 200
        client.delete(f"/sessions/{opened[0]}")
        assert client.post("/sessions", json={"images": [image]}).status_code == 200


def test_too_many_calls_are_turned_away_and_then_served_again(start_server):
    with start_server(ServerSettings(pool=POOL, calls=2), token=None) as client:
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            request = {"code": "import time; time.sleep(1)", "language": "python"}
            answers = list(threads.map(lambda _: client.post("/run_code", json=request), range(8)))
        statuses = [answer.status_code for answer in answers]
        assert statuses.count(200) >= 2
        assert statuses.count(429) >= 1
        assert set(statuses) == {200, 429}
        assert client.post("/run_code", json=request).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_only_loopback_without_a_token(host):
    with pytest.raises(ConfigError, match="token"):
        asyncio.run(asyncio.wait_for(serve(host, 0), 20))


@pytest.mark.parametrize("token", ["", "with space", "line\n", "ümlaut"])
def test_a_token_that_cannot_be_sent_is_refused(token):
    with pytest.raises(ConfigError, match="token"):
        asyncio.run(asyncio.wait_for(serve("127.0.0.1", 0, token), 20))


def half_a_body(port, path="/run_code"):
    """A connection that declared a body and sent a part of it."""
    open_one = socket.create_connection(("127.0.0.1", port), timeout=30)
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    open_one.sendall(head.encode() + b'{"code"')
    return open_one


def test_half_sent_bodies_keep_nobody_out_and_do_not_wait_for_ever(start_server):
    settings = ServerSettings(pool=POOL, calls=2, body_seconds=2.0)
    with start_server(settings, token=None) as client, contextlib.ExitStack() as stack:
        held = [stack.enter_context(half_a_body(client.base_url.port)) for _ in range(8)]
        assert run_code(client, "print(6 * 7)")["run_result"]["stdout"] == "42\n"
        answers = [one.makefile("rb").read() for one in held]  # read to the end: the server hangs up by itself
        assert {answer.split()[1] for answer in answers} == {b"408"}


def test_a_call_ends_with_its_client(start_server):
    """Every slot of the sandbox is taken by clients that hang up; the next one need not wait for their code."""
    settings = ServerSettings(pool=POOL, calls=2, seconds=600)
    with start_server(settings, token=None) as client:
        code = "import time\nwhile True: time.sleep(0.05)"
        for path, body in [
            ("/run_code", {"code": code, "language": "python", "run_timeout": 600}),
            ("/run_jupyter", {"cells": [code], "cell_timeout": 600, "total_timeout": 600}),
        ]:
            for _ in range(2):
                with pytest.raises(httpx.ReadTimeout):
                    client.post(path, json=body, timeout=1.0)
            answer = settled(lambda: client.post("/run_code", json={"code": "print(1)", "language": "python"}))
            assert answer.json()["run_result"]["stdout"] == "1\n"


def test_a_call_ends_with_its_client_also_when_that_one_had_sent_on(start_server):
    """uvicorn reads no more while a pipelined request waits, so that it does not see the end of the connection."""
    with start_server(ServerSettings(pool=POOL, calls=1, seconds=600), token=None) as client:
        body = b'{"code": "import time\\ntime.sleep(600)", "language": "python", "run_timeout": 600}'
        head = "POST /run_code HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        with socket.create_connection(("127.0.0.1", client.base_url.port), timeout=30) as connection:
            connection.sendall(request)
            busy = {"code": "print(1)", "language": "python"}
            while client.post("/run_code", json=busy).status_code == 200:
                time.sleep(0.05)  # until the call runs
            for _ in range(3):
                connection.sendall(request)
        assert settled(lambda: client.post("/run_code", json=busy)).json()["run_result"]["stdout"] == "1\n"


def test_a_session_whose_call_was_abandoned_is_gone_and_not_quietly_a_new_one(start_server):
    with start_server(ServerSettings(pool=POOL, calls=4, seconds=600), token=None) as client:
        number = client.post("/sessions", json={}).json()["id"]
        assert client.post(f"/sessions/{number}/run", json={"code": "x = 1"}).json()["status"] == "ok"
        with pytest.raises(httpx.ReadTimeout):
            slow = {"code": "import time; time.sleep(600)", "seconds": 600}
            client.post(f"/sessions/{number}/run", json=slow, timeout=1.0)
        deadline = time.monotonic() + 60
        while (answer := client.post(f"/sessions/{number}/run", json={"code": "x"})).status_code == 410:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert answer.status_code == 404


def settled(ask):
    """The first answer that is no 429; a server needs a moment to see that a client is gone."""
    deadline = time.monotonic() + 60
    while (answer := ask()).status_code == 429:
        assert time.monotonic() < deadline, "a slot is still taken by a client that is gone"
        time.sleep(0.05)
    assert answer.status_code == 200
    return answer


def test_a_web_page_cannot_have_code_run(start_server):
    with start_server(ServerSettings(pool=POOL), token=None) as client:
        body = b'{"code": "print(1)", "language": "python"}'
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
            assert client.post("/run_code", content=body, headers={"Content-Type": kind}).status_code == 415, kind
        rebound = {"Host": "evil.example", **JSON}
        assert client.post("/run_code", content=body, headers=rebound).status_code == 400
        assert client.post("/run_code", content=body, headers=JSON).status_code == 200
