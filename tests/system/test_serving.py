"""Who may reach a server and with what: the gate on real ports, and sockets that never say what they want."""

import asyncio
import base64
import contextlib
import socket

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse

from turnwise.errors import ConfigError
from turnwise.system.addresses import bind, check_binding, is_loopback
from turnwise.system.serving import Gate, Intake, serve_app

TOKEN = "s3cret-token"
JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "192.168.0.3", "example.org", "", "127.0.0.1.example"])
def test_an_address_that_others_reach_needs_a_token(host):
    assert not is_loopback(host)
    with pytest.raises(ConfigError, match="a board on .* shows runs .*give it a token"):
        check_binding(host, None, "a board", "shows runs")
    assert check_binding(host, "secret", "a board", "shows runs") is None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_this_machine_needs_none(host):
    assert is_loopback(host)
    assert check_binding(host, None, "a board", "shows runs") is None


@pytest.mark.parametrize("token", ["", "with space", "line\n", "ümlaut"])
def test_a_token_that_cannot_be_sent_is_refused(token):
    with pytest.raises(ConfigError, match="printable ASCII"):
        check_binding("127.0.0.1", token, "a board", "shows runs")


def test_a_port_that_cannot_be_had_is_a_sentence():
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is taken"):
            bind("127.0.0.1", port)
        with bind("127.0.0.1", port, any_port=True) as other:
            assert other.getsockname()[1] != port
    for port in (99_999_999, -1):
        with pytest.raises(ConfigError, match=f"--port {port}"):
            bind("127.0.0.1", port)


class Echo:
    """An app that says what it was sent; `wait` in a body keeps it busy until it is cancelled, and `ended` tells."""

    def __init__(self):
        self.seen = 0
        self.ended = asyncio.Event()

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            while (message := await receive())["type"] != "lifespan.shutdown":
                await send({"type": f"{message['type']}.complete"})
            return await send({"type": "lifespan.shutdown.complete"})
        self.seen += 1
        body = await Request(scope, receive).body()
        if body == b'"wait"':
            try:
                await asyncio.Event().wait()
            finally:
                self.ended.set()
        await JSONResponse({"sent": body.decode()})(scope, receive, send)


@contextlib.asynccontextmanager
async def serving(app, host="127.0.0.1", token=None, idle=75.0, **intake):
    """The gate before an app, served as our servers are; a client for it."""
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    running = asyncio.ensure_future(serve_app(Gate(app, host, token, Intake(**intake)), "127.0.0.1", port, idle))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
        while True:
            assert not running.done()
            with contextlib.suppress(httpx.ConnectError):
                await client.get("/health")
                break
            await asyncio.sleep(0.01)
        app.seen = 0
        yield client
    running.cancel()
    await asyncio.wait((running,))


def asked(*requests, **settings):
    """(statuses of these requests, how many of them the app saw)."""

    async def main():
        app = Echo()
        async with serving(app, **settings) as client:
            found = [(await client.request(method, "/x", **more)).status_code for method, more in requests]
            return found, app.seen

    return asyncio.run(main())


@pytest.mark.parametrize("kind", [None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data",
                                  "text/plain; application/json", "application/jsonp"])  # fmt: skip
def test_a_body_that_a_web_page_can_send_is_refused_unread(kind):
    headers = {} if kind is None else {"Content-Type": kind}
    found, seen = asked(("POST", {"content": b"{}", "headers": headers}), ("POST", {"content": b"{}", "headers": JSON}))
    assert (found, seen) == ([415, 200], 1)


def test_a_body_may_name_its_characters():
    kinds = ("application/json; charset=utf-8", "APPLICATION/JSON")
    found, _ = asked(*(("POST", {"content": b"{}", "headers": {"Content-Type": kind}}) for kind in kinds))
    assert found == [200, 200]


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "10.1.2.3", "", "a@localhost", "[::1"])
def test_a_strangers_name_for_our_address_is_refused(host):
    requests = [(method, {"headers": {**JSON, "Host": host}}) for method in ("GET", "POST", "DELETE")]
    assert asked(*requests) == ([400, 400, 400], 0)
    assert asked(*requests, token=TOKEN) == ([400, 400, 400], 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8080", "[::1]:80", "LOCALHOST"])
def test_the_names_of_this_machine_pass(host):
    assert asked(("GET", {"headers": {"Host": host}})) == ([200], 1)


def test_a_server_on_every_address_relies_on_its_token():
    name = {"Host": "node17.example", "Authorization": f"Bearer {TOKEN}"}
    assert asked(("GET", {"headers": name}), host="0.0.0.0", token=TOKEN) == ([200], 1)
    assert asked(("GET", {"headers": {"Host": "node17.example"}}), host="0.0.0.0", token=TOKEN) == ([401], 0)
    assert asked(("GET", {"headers": name}), host="10.1.2.3", token=TOKEN) == ([400], 0)


def test_the_token_is_borne_or_is_a_password():
    basic = base64.b64encode(f"any:{TOKEN}".encode()).decode()
    good = [f"Bearer {TOKEN}", f"bearer {TOKEN}", f"Basic {basic}"]
    bad = ["", "Bearer", TOKEN, f"Bearer {TOKEN}x", f"Basic {TOKEN}", "Basic !!", "Bearer \xff", "Digest x"]
    requests = [("GET", {"headers": {"Authorization": one.encode("latin-1")}}) for one in (*good, *bad)]
    found, seen = asked(*requests, token=TOKEN)
    assert found == [200] * 3 + [401] * 8 and seen == 3


def test_long_bodies_and_many_values_are_refused_unread():
    bomb = b"[" + b",".join([b"[]"] * 500) + b"]"
    found, seen = asked(
        ("POST", {"content": b'"' + b"x" * 2000 + b'"', "headers": JSON}),
        ("POST", {"content": bomb, "headers": JSON}),
        ("POST", {"content": b'"' + b"x" * 500 + b'"', "headers": JSON}),
        body=1600, values=900,
    )  # fmt: skip
    assert (found, seen) == ([413, 413, 200], 1)


def test_what_is_held_at_once_is_bounded():
    """Eight bodies of the largest size; the clients of more are asked to come again."""

    async def main():
        async with serving(Echo(), body=10_000, seconds=30) as client:
            address = "127.0.0.1", client.base_url.port
            streams = [await asyncio.open_connection(*address) for _ in range(12)]
            for _, writer in streams:
                writer.write(head(9_900) + b"x" * 9_800)
                await writer.drain()
            done, waiting = await asyncio.wait(
                [asyncio.ensure_future(reader.read(12)) for reader, _ in streams], timeout=20,
                return_when=asyncio.FIRST_COMPLETED,
            )  # fmt: skip
            found = {one.result() for one in done}
            for task in waiting:
                task.cancel()
            for _, writer in streams:
                writer.close()
            return found, len(waiting), await ends_in(client, 200)

    found, waiting, after = asyncio.run(main())
    assert found == {b"HTTP/1.1 429"} and waiting >= 8 and after == 200


async def ends_in(client, status):
    """The status of a small request, once it is this one."""
    for _ in range(1000):
        found = (await client.post("/x", content=b"{}", headers=JSON)).status_code
        if found == status:
            break
        await asyncio.sleep(0.02)
    return found


def head(length, more=""):
    lines = f"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{more}"
    return f"{lines}Content-Length: {length}\r\n\r\n".encode()


def test_a_half_sent_body_is_given_up_and_keeps_nobody_out():
    async def main():
        app = Echo()
        async with serving(app, calls=1, seconds=1.0) as client:
            address = "127.0.0.1", client.base_url.port
            streams = [await asyncio.open_connection(*address) for _ in range(6)]
            for _, writer in streams:
                writer.write(head(100) + b'{"half')
                await writer.drain()
            served = (await client.post("/x", content=b"{}", headers=JSON)).status_code
            dribble = asyncio.ensure_future(drip(streams[0][1]))  # a byte now and then does not buy more time
            ends = [await reader.read() for reader, _ in streams[1:]]
            with contextlib.suppress(ConnectionResetError):  # a byte sent after the end may overtake what was answered
                ends.append(await streams[0][0].read())
            dribble.cancel()
            return served, ends, app.seen

    served, ends, seen = asyncio.run(main())
    assert served == 200 and seen == 1 and len(ends) >= 5
    assert all(end.startswith(b"HTTP/1.1 408") for end in ends)


async def drip(writer):
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("start", [b"", b"POST /x HT", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea"])
def test_a_connection_that_asks_for_nothing_is_closed(start):
    async def main():
        async with serving(Echo(), idle=0.3) as client:
            reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
            writer.write(start)
            await reader.read()  # ends only when the server hangs up
            return True

    assert asyncio.run(asyncio.wait_for(main(), 60))


def test_a_long_call_is_not_taken_for_an_idle_connection():
    async def main():
        app = Echo()
        async with serving(app, idle=0.1) as client:
            waiting = asyncio.ensure_future(client.post("/x", content=b'"wait"', headers=JSON))
            done, _ = await asyncio.wait((waiting, asyncio.ensure_future(app.ended.wait())), timeout=1.5)
            waiting.cancel()
            return len(done)

    assert asyncio.run(main()) == 0


@pytest.mark.parametrize("sent_on", [False, True])
def test_a_call_ends_with_its_client(sent_on):
    """Also when the client has sent another request by then, at which uvicorn reads no more."""

    async def main():
        app = Echo()
        async with serving(app, calls=1) as client:
            _, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
            writer.write(head(6) + b'"wait"')
            await writer.drain()
            assert await ends_in(client, 429) == 429
            if sent_on:
                writer.write((head(6) + b'"wait"') * 2)
                await writer.drain()
                await asyncio.sleep(0.2)
            writer.close()
            await asyncio.wait_for(app.ended.wait(), 60)
            return await ends_in(client, 200)

    assert asyncio.run(main()) == 200


def test_an_upgrade_to_a_websocket_is_no_way_in():
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "x"}
    found, _ = asked(("GET", {"headers": upgrade}), token=TOKEN)
    assert found == [401]


def test_a_socket_that_only_connects_does_no_harm():
    async def main():
        async with serving(Echo()) as client:
            with contextlib.ExitStack() as stack:
                for _ in range(64):
                    stack.enter_context(socket.create_connection(("127.0.0.1", client.base_url.port)))
                return (await client.get("/x")).status_code

    assert asyncio.run(main()) == 200


def test_bodies_that_come_slowly_do_not_get_past_the_number_of_calls_together():
    """Both are told to go on while nothing runs; when both have come, one is taken."""

    async def main():
        app = Echo()
        async with serving(app, calls=1) as client:
            port = client.base_url.port
            pipes = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            head = "POST /x HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 6\r\n\r\n"
            for _, writer in pipes:
                writer.write(head.encode() + b'"wa')
                await writer.drain()
            await client.get("/health")  # both heads have been read by then, or are read before the rest of the bodies
            for _, writer in pipes:
                writer.write(b'it"')
                await writer.drain()
            lines = [asyncio.ensure_future(reader.readline()) for reader, _ in pipes]
            done, waiting = await asyncio.wait(lines, return_when=asyncio.FIRST_COMPLETED, timeout=30)
            found = [line.result() for line in done]
            for line in waiting:
                line.cancel()
            for _, writer in pipes:
                writer.close()
            return found, len(waiting)

    found, waiting = asyncio.run(main())
    assert (len(found), waiting) == (1, 1) and b" 429 " in found[0]
