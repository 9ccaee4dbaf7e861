"""The end of a run while agents have requests under way: nothing is printed of it."""

import asyncio

from turnwise.system import serving
from turnwise.system.serving import serving_beside


def test_requests_under_way_at_the_end_are_no_traceback(capfd, monkeypatch):
    settings = serving._settings

    def impatient(app, idle_seconds):
        found = settings(app, idle_seconds)
        found.timeout_graceful_shutdown = 1
        return found

    monkeypatch.setattr(serving, "_settings", impatient)

    async def app(scope, receive, send):
        if scope["type"] == "http":
            await asyncio.Event().wait()

    async def main():
        async with serving_beside(app, "127.0.0.1") as port:
            for text in (
                b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
                b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n",
            ):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(text)
                await writer.drain()
            await asyncio.sleep(0.2)

    asyncio.run(main())
    printed = capfd.readouterr()
    assert "Traceback" not in printed.err + printed.out and "graceful" not in printed.err
