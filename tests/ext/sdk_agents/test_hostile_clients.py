"""Clients that do what no SDK does: each is refused by name, and the episode goes on; nothing is left of the server."""

import json

import httpx
import pytest

from turnwise.ext.sdk_agents import server

USER = {"role": "user", "content": "6*7?"}


def body(**other):
    return json.dumps({"model": "policy", "messages": [USER], **other}).encode()


@pytest.mark.parametrize(
    ("sent", "headers", "status"),
    [
        (b'{"model": "a", "messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", {}, 400),
        (b'{"model": "\xff", "messages": [{"role": "user", "content": "a"}]}', {}, 400),
        (b'{"model": "a", "messages": [{"role": "user", "content": "a\\ud800b"}]}', {}, 400),
        (b'{"model": "a", "max_tokens": ' + b"9" * 5000 + b"}", {}, 400),
        (body(echo=True), {}, 400),
        (body(messages=[{**USER, "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]), {}, 400),
        (body(), {"host": "elsewhere.example"}, 400),
        (body(), {"content-type": "text/plain"}, 415),
        (body(messages=[USER] * 3000), {}, 200),
    ],
    ids=["deep", "utf-8", "surrogate", "number", "parameter", "file", "host", "type", "many"],
)  # fmt: skip
def test_a_request_that_cannot_be_served_is_refused_and_the_next_one_is(rollouts, agent, sent, headers, status):
    seen = []

    async def run(base_url, sample):
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            for content, more in ((sent, headers), (body(), {})):
                given = {"content-type": "application/json", **more}
                answer = await client.post(f"{base_url}/chat/completions", content=content, headers=given)
                seen.append(answer.status_code)

    found = rollouts.make(["#### 42"], client=agent(run)).play()
    assert found.failure is None and seen == [status, 200]
    assert not server._running
