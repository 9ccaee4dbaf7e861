"""The client against servers that are not ours: a plain SandboxFusion server, and servers that misbehave."""

import asyncio
import contextlib
import subprocess
import sys
import time

import fastapi
import pytest

from turnwise.ext.sandbox import remote
from turnwise.ext.sandbox.level import SandboxLevel
from turnwise.ext.sandbox.limits import Limits
from turnwise.ext.sandbox.remote import RemotePool
from turnwise.ext.sandbox.results import ExecutionStatus, InputImage
from turnwise.ext.sandbox.zygote_process import SandboxLost, SandboxUnavailable


@pytest.fixture(scope="module")
def serving_app(serving_in_a_thread):
    """Serves an app that needs nothing opened; its URL."""
    return lambda app: serving_in_a_thread(lambda: contextlib.nullcontext(app))


def in_session(url, work, stateless=False, **more):
    """The result of `work(session)`."""

    async def main():
        async with RemotePool(url, **more) as pool:
            async with pool.session(stateless=stateless) as session:
                return await work(session)

    return asyncio.run(main())


# A plain SandboxFusion server, written from its contract: one process per request.


def plain_app():
    app = fastapi.FastAPI()

    @app.post("/run_code")
    def run_code(request: dict):
        start = time.time()
        ran = {"status": "Finished", "execution_time": None, "return_code": None, "stdout": None, "stderr": None}
        try:
            process = subprocess.run(
                [sys.executable, "-c", request["code"]],
                input=request.get("stdin") or "",
                capture_output=True,
                text=True,
                timeout=request.get("run_timeout", 10),
            )
            ran.update(return_code=process.returncode, stdout=process.stdout, stderr=process.stderr)
        except subprocess.TimeoutExpired:
            ran.update(status="TimeLimitExceeded", stdout="", stderr="")
        ran["execution_time"] = time.time() - start
        status = "Success" if ran["return_code"] == 0 else "Failed"
        return {
            "status": status,
            "message": "",
            "compile_result": None,
            "run_result": ran,
            "executor_pod_name": None,
            "files": {},
        }

    return app


@pytest.fixture(scope="module")
def plain(serving_app):
    with serving_app(plain_app()) as url:
        yield url


def plainly(url, code, seconds=None):
    return in_session(url, lambda s: s.run(code, seconds), stateless=True, min_level=SandboxLevel.L0)


def test_a_plain_server_runs_stateless_code(plain):
    result = plainly(plain + "/run_code", "print(6 * 7)")
    assert (result.status, result.stdout, result.value) == (ExecutionStatus.OK, "42\n", None)
    assert result.seconds > 0


def test_a_plain_server_s_failures_keep_their_kind(plain):
    failed = plainly(plain, "print('out'); 1 / 0")
    assert (failed.status, failed.stdout) == (ExecutionStatus.ERROR, "out\n")
    assert "ZeroDivisionError" in failed.stderr
    assert plainly(plain, "import time; time.sleep(20)", 0.3).status is ExecutionStatus.TIMEOUT
    assert plainly(plain, "import os; os.abort()").status is ExecutionStatus.KILLED
    assert "characters left out" in plainly(plain, f"print('x' * {10 * Limits().output})").stdout


def test_a_plain_server_cannot_remember_and_says_so_at_once(plain):
    async def main():
        async with RemotePool(plain, min_level=SandboxLevel.L0) as pool:
            with pytest.raises(SandboxUnavailable, match="only /run_code, without sessions that remember"):
                pool.session()
            with pytest.raises(SandboxUnavailable, match="only /run_code, without images"):
                pool.session(stateless=True, images=[InputImage("a.png", b"x")])

    asyncio.run(main())


def test_a_plain_server_has_proven_nothing(plain):
    with pytest.raises(SandboxUnavailable, match="plain SandboxFusion"):
        in_session(plain, lambda session: session.run("1"), stateless=True)


def told(**more):
    whole = {
        "status": "ok",
        "stdout": "",
        "stderr": "",
        "value": "1",
        "images": [],
        "failure": None,
        "notices": [],
        "seconds": 0.1,
        "peak_memory": 0,
        "kept": True,
    }
    return {**whole, **more}


def liar(answer):
    """A server that opens a session and then answers a call in its own way; the calls it got."""
    app = fastapi.FastAPI()
    calls = []

    @app.get("/report")
    def report():
        return {"level": "L3", "text": "trust me"}

    @app.post("/sessions")
    def open_session():
        return {"id": "a" * 32}

    @app.post("/sessions/{number}/run")
    def run(number: str):
        calls.append(number)
        return answer(len(calls))

    return app, calls


PROVENANCE = {"source": None, "box": None, "steps": []}
GARBAGE = {
    "not json": fastapi.Response(b"<html>gateway</html>"),
    "empty": fastapi.Response(b""),
    "list": [],
    "no fields": {},
    "unknown status": told(status="great"),
    "value that is not text": told(stdout=5),
    "text without end": told(stdout="x" * 3_000_000),
    "lone surrogate": fastapi.Response(b'{"status": "ok", "stdout": "\\ud800"}'),
    "infinite time": fastapi.Response(b'{"status": "ok", "seconds": Infinity}'),
    "image too short": told(
        images=[{"name": "a", "mode": "L", "size": [9, 9], "data": "eA==", "provenance": PROVENANCE}]
    ),
    "image of no kind": told(
        images=[{"name": "a", "mode": "P", "size": [1, 1], "data": "eA==", "provenance": PROVENANCE}]
    ),
    "image not base64": told(
        images=[{"name": "a", "mode": "L", "size": [1, 1], "data": "!", "provenance": PROVENANCE}]
    ),
    "too many notices": told(notices=["n"] * 1000),
    "500": fastapi.Response(b"oops", status_code=500),
    "redirect": fastapi.Response(b"", status_code=302, headers={"Location": "/"}),
    "compressed": fastapi.Response(b"x", headers={"Content-Encoding": "gzip"}),
    "deep": fastapi.Response(b"[" * 100_000),
}


@pytest.fixture(scope="module")
def garbage(serving_app):
    """A server that answers with the garbage whose name the code is, and the calls it got."""
    app, _ = liar(None)
    app.router.routes = [route for route in app.router.routes if not route.path.endswith("/run")]
    calls = []

    @app.post("/sessions/{number}/run")
    def run(number: str, request: dict):
        calls.append(request["code"])
        return GARBAGE[request["code"]]

    with serving_app(app) as url:
        yield url, calls


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_lost_and_never_a_result(garbage, name):
    url, calls = garbage
    with pytest.raises(SandboxLost):
        in_session(url, lambda session: session.run(name))
    assert calls.count(name) == 1  # it may have run: never twice


def test_what_is_no_garbage_is_a_result(serving_app):
    app, _ = liar(lambda _: told(stdout="fine"))
    with serving_app(app) as url:
        assert in_session(url, lambda session: session.run("1")).stdout == "fine"


def test_an_answer_that_is_too_long_is_cut_off(monkeypatch, serving_app):
    monkeypatch.setattr(remote, "MAX_ANSWER", 100_000)

    async def long():
        for _ in range(1000):
            yield b"x" * 10_000
            await asyncio.sleep(0)

    app, _ = liar(lambda _: fastapi.responses.StreamingResponse(long()))
    with serving_app(app) as url:
        with pytest.raises(SandboxLost, match="more than 100000 bytes"):
            in_session(url, lambda session: session.run("1"))


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again_and_answers(status, serving_app):
    app, calls = liar(lambda count: told() if count == 3 else fastapi.Response(status_code=status))
    with serving_app(app) as url:
        assert in_session(url, lambda session: session.run("1")).value == "1"
    assert len(calls) == 3


def test_a_server_that_stays_busy_is_given_up(serving_app):
    app, calls = liar(lambda _: fastapi.Response(b"full", status_code=429))
    with serving_app(app) as url:
        with pytest.raises(SandboxLost, match="429: full .3 attempts."):
            in_session(url, lambda session: session.run("1"), retries=2)
    assert len(calls) == 3


def test_no_answer_in_time_is_lost(serving_app):
    async def slow():
        await asyncio.sleep(2)
        return told()

    app, _ = liar(lambda _: None)
    app.router.routes = [route for route in app.router.routes if not route.path.endswith("/run")]
    app.post("/sessions/{number}/run")(slow)
    with serving_app(app) as url:
        with pytest.raises(SandboxLost, match="did not answer"):
            in_session(url, lambda session: session.run("1", 0.1), grace_seconds=0.2)


@pytest.mark.parametrize(
    "report", [{}, {"level": "L9", "text": ""}, {"level": "auto", "text": ""}, {"level": "L3"}, "L3"]
)
def test_a_report_that_is_none_proves_nothing(report, serving_app):
    app = fastapi.FastAPI()
    app.get("/report")(lambda: report)
    with serving_app(app) as url:
        with pytest.raises(SandboxUnavailable):
            in_session(url, lambda session: session.run("1"))
