"""The gate: which requests pass, and what every answer carries."""

import asyncio

import httpx
import pytest
from starlette.responses import PlainTextResponse

from turnwise.ext.board.access import BoardAddress, BoardGate, content_policy

TOKEN = "s3cret-token"
LOCAL = BoardAddress("127.0.0.1", 7007)
REMOTE = BoardAddress("10.1.2.3", 7007, TOKEN)


async def inner(scope, receive, send):
    await PlainTextResponse("shown", headers={"Seen-As": scope["method"]})(scope, receive, send)


def ask(address, path="/api/runs", method="GET", host="127.0.0.1:7007", **headers):
    async def main():
        gate = BoardGate(inner, address, content_policy(["abc="]))
        transport = httpx.ASGITransport(gate)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", trust_env=False) as client:
            sent = {"Host": host} | {name.replace("_", "-"): value for name, value in headers.items()}
            return await client.request(method, path, headers=sent)

    return asyncio.run(main())


@pytest.mark.parametrize("host", ["127.0.0.1:7007", "localhost:7007", "LOCALHOST", "[::1]:7007", "127.0.0.1"])
def test_the_names_of_this_machine_pass(host):
    assert ask(LOCAL, host=host).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:7007",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "10.1.2.3",
        "",
        "[::1",
        "localhost:x",
        "a@localhost",
    ],
)
def test_a_strangers_name_for_our_address_is_refused(host):
    found = ask(LOCAL, host=host)
    assert found.status_code == 400 and "host name" in found.json()["error"]


def test_a_board_elsewhere_is_served_under_its_address_and_localhost():
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    assert ask(REMOTE, host="10.1.2.3:7007", **bearer).status_code == 200
    assert ask(REMOTE, host="localhost:7007", **bearer).status_code == 200
    assert ask(REMOTE, host="evil.example", **bearer).status_code == 400
    assert ask(BoardAddress("0.0.0.0", 7007, TOKEN), host="node17.example:7007", **bearer).status_code == 200
    assert ask(BoardAddress("0.0.0.0", 7007), host="node17.example:7007").status_code == 400


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_but_reading(method):
    found = ask(LOCAL, method=method)
    assert found.status_code == 405 and found.headers["allow"] == "GET, HEAD"


def test_head_is_answered_as_get_except_for_the_stream():
    assert ask(LOCAL, method="HEAD").headers["seen-as"] == "GET"  # the server, not the app, leaves the body out
    assert ask(LOCAL, "/api/events", method="HEAD").headers["seen-as"] == "HEAD"


@pytest.mark.parametrize("path, host", [("/", "127.0.0.1"), ("/api/runs", "127.0.0.1"), ("/api/runs", "evil.example")])
def test_every_answer_has_the_headers(path, host):
    headers = ask(LOCAL, path, host=host).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == "'self' 'sha256-abc='"
    assert (headers.get("cache-control") == "no-store") == path.startswith("/api")


@pytest.mark.parametrize("path", ["/", "/api/runs", "/static/js/main.js", "/plotly.js", "/api/runs?token=" + TOKEN])
def test_without_the_token_nothing_is_shown(path):
    found = ask(REMOTE, path)
    assert found.status_code == 401 and "token" in found.json()["error"]


@pytest.mark.parametrize("given", ["", "Bearer", "Bearer wrong", f"Bearer {TOKEN}x", f"Basic {TOKEN}", TOKEN])
def test_a_wrong_header_does_not_pass(given):
    assert ask(REMOTE, Authorization=given).status_code == 401


def test_the_token_in_the_address_becomes_a_cookie_and_leaves_the_address():
    found = ask(REMOTE, f"/?token={TOKEN}&theme=dark")
    assert found.status_code == 303 and found.headers["location"] == "/?theme=dark"
    cookie = found.headers["set-cookie"]
    assert "HttpOnly" in cookie and "samesite=strict" in cookie.lower() and TOKEN not in cookie
    pair = cookie.split(";")[0]
    assert ask(REMOTE, Cookie=pair).status_code == 200
    assert ask(REMOTE, Cookie=pair + "x").status_code == 401
    assert ask(BoardAddress("10.1.2.3", 7007, "another"), Cookie=pair).status_code == 401
    assert ask(BoardAddress("10.1.2.3", 7008, TOKEN), Cookie=pair).status_code == 401
    # a link with the token is cleaned for those who have the cookie already, too
    assert ask(REMOTE, f"/?token={TOKEN}", Cookie=pair).status_code == 303


def test_a_wrong_token_in_the_address_gets_no_cookie():
    found = ask(REMOTE, "/?token=guess")
    assert found.status_code == 401 and "set-cookie" not in found.headers


def test_a_token_is_asked_for_on_this_machine_too_when_there_is_one():
    address = BoardAddress("127.0.0.1", 7007, TOKEN)
    assert ask(address).status_code == 401
    assert ask(address, Authorization=f"bearer {TOKEN}").status_code == 200


def test_the_address_for_a_browser():
    assert BoardAddress("127.0.0.1", 7007).url == "http://127.0.0.1:7007/"
    assert BoardAddress("::1", 80).url == "http://[::1]:80/"
    assert BoardAddress("::", 7007, TOKEN).url == "http://[::1]:7007/"
    assert BoardAddress("0.0.0.0", 7007, TOKEN).url == "http://127.0.0.1:7007/"
    assert TOKEN not in BoardAddress("0.0.0.0", 7007, TOKEN).url
