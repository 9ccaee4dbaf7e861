"""Images that clients send: to an endpoint that sees them, byte for byte; a plain refusal where nobody can."""

import base64
import json
import struct
import threading
import zlib
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO

import anthropic
import openai
import pytest
import vision_processors
from PIL import Image as Picture
from rich.console import Console
from sdk_clients import ask, async_anthropic, async_openai

from turnwise import configure, evaluate
from turnwise.chat.formats import hermes
from turnwise.chat.images.processor import find_image_processor
from turnwise.chat.renderer import Renderer
from turnwise.chat.tokenizer import Tokenizer
from turnwise.types import StopReason


def png():
    with BytesIO() as file:
        Picture.new("RGB", (5, 3), (200, 30, 60)).save(file, "PNG")
        return file.getvalue()


DATA = base64.b64encode(png()).decode()
URL = f"data:image/png;base64,{DATA}"
CHAT = [
    {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": URL}}]}
]
ITEMS = [
    {
        "role": "user",
        "content": [
            {"type": "input_text", "text": "see"},
            {"type": "input_image", "image_url": URL, "detail": "auto"},
        ],
    }
]
BLOCKS = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "see"},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}},
        ],
    }
]


@contextmanager
def endpoint():
    """A server that answers like OpenAI's, on this machine; yields its address and what it was sent."""
    received = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def answer(self, body):
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            self.answer({"object": "list", "data": [{"id": "seer", "object": "model"}]})

        def do_POST(self):
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            choice = {"index": 0, "message": {"role": "assistant", "content": "red"}, "finish_reason": "stop"}
            usage = {"prompt_tokens": 7, "completion_tokens": 1}
            self.answer({"model": "seer", "choices": [choice], "usage": usage})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", received
    finally:
        server.shutdown()
        server.server_close()


def test_an_image_reaches_an_endpoint_byte_for_byte(agent, tmp_path):
    async def run(base_url, sample):
        async with async_openai(base_url) as client, async_anthropic(base_url) as other:
            await client.chat.completions.create(model="m", messages=CHAT)
            await client.responses.create(model="m", input=ITEMS)
            await other.messages.create(model="m", max_tokens=9, messages=BLOCKS)
            broken = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
            for role, content in (("user", broken), ("system", CHAT[0]["content"])):
                with pytest.raises(openai.BadRequestError, match="image") as caught:
                    await client.chat.completions.create(model="m", messages=[{"role": role, "content": content}])
                assert caught.value.code == "invalid_image"
            with pytest.raises(anthropic.BadRequestError, match="counts tokens"):
                await other.messages.count_tokens(model="m", messages=ask())

    with endpoint() as (url, received):
        config = configure(
            "engine=openai", f"engine.base_url={url}", "eval.samples=1", f"runs_dir={tmp_path}",
            f"sdk_agents.client={agent(run)}", "rollout.tools=[]", "rollout.interaction=null",
        )  # fmt: skip
        report = evaluate(config, console=Console(quiet=True))
    (found,) = report.trajectories
    assert found.failure is None, found.failure
    assert len(received) == 3
    for request in received:
        text, image = request["messages"][-1]["content"]
        assert text == {"type": "text", "text": "see"}
        assert base64.b64decode(image["image_url"]["url"].removeprefix("data:image/png;base64,")) == png()


def test_an_engine_that_reads_text_only_says_so_in_each_dialect(rollouts, agent):
    async def run(base_url, sample):
        async with async_openai(base_url) as client, async_anthropic(base_url) as other:
            calls = [
                (openai.BadRequestError, client.chat.completions.create(model="m", messages=CHAT)),
                (openai.BadRequestError, client.responses.create(model="m", input=ITEMS)),
                (anthropic.BadRequestError, other.messages.create(model="m", max_tokens=9, messages=BLOCKS)),
            ]
            for error, work in calls:
                with pytest.raises(error, match="engine reads text only, and there is an image"):
                    await work
            await client.chat.completions.create(model="m", messages=ask())

    found = rollouts.make(["ok"], client=agent(run)).play()
    assert found.failure is None and len(found.turns) == 1


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    folder = vision_processors.build("qwen2_5_vl", tmp_path_factory.mktemp("seer"))
    tokenizer = Tokenizer(folder)
    return Renderer(tokenizer, hermes, images=find_image_processor(folder, tokenizer, None))


def test_images_of_clients_are_shown_to_a_model_that_sees(rollouts, agent, seeing):
    broken = [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + DATA[:60]}}]

    async def run(base_url, sample):
        async with async_openai(base_url) as client, async_anthropic(base_url) as other:
            with pytest.raises(openai.BadRequestError, match="image cannot be read") as caught:
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": broken}])
            assert caught.value.code == "invalid_image"
            first = await client.chat.completions.create(model="m", messages=CHAT)
            said = [{"role": "assistant", "content": first.choices[0].message.content}]
            await client.chat.completions.create(model="m", messages=[*CHAT, *said, *CHAT])
            with pytest.raises(anthropic.BadRequestError, match="counted only when the model answers"):
                await other.messages.count_tokens(model="m", messages=BLOCKS)

    rollout = rollouts.make(["one", "two"], client=agent(run), renderer=seeing)
    found = rollout.play()
    assert found.failure is None, found.failure
    (ledger,) = found.segments
    assert [len(request.media) for request in rollout.sampler.seen] == [1, 2] and len(ledger.media) == 2
    assert ledger.media[0].media is ledger.media[1].media
    assert found.render_check is not None and found.render_check.exact


def shown(*contents):
    """A user's message with these images."""
    urls = [f"data:image/png;base64,{base64.b64encode(content).decode()}" for content in contents]
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}} for url in urls]}]


def test_budgets_come_before_pixels(rollouts, agent, seeing):
    with BytesIO() as file:
        Picture.effect_noise((20, 20), 64).save(file, "PNG")
        cut = file.getvalue()[:-100]  # a sound head: whoever unpacks it finds that it ends too early
    huge = bytearray(png())
    huge[16:24] = struct.pack(">II", 9000, 9000)
    huge[29:33] = struct.pack(">I", zlib.crc32(huge[12:29]))
    too_many = []

    async def run(base_url, sample):
        async with async_openai(base_url) as client:
            for contents, said in (
                ([cut, bytes(huge)], "9000x9000 pixels: at most"),
                ([cut, b"%PDF-1.7"], "is not a PNG"),
                ([cut], "truncated"),
            ):
                with pytest.raises(openai.BadRequestError, match=said) as caught:
                    await client.chat.completions.create(model="m", messages=shown(*contents))
                assert caught.value.code == "invalid_image"
            web = [*shown(cut)[0]["content"], {"type": "image_url", "image_url": {"url": "http://example.org/a.png"}}]
            with pytest.raises(openai.BadRequestError, match="nothing is fetched"):
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": web}])
            first = await client.chat.completions.create(model="m", messages=CHAT)
            said = [{"role": "assistant", "content": first.choices[0].message.content}]
            with pytest.raises(openai.BadRequestError, match="image_budget") as caught:
                await client.chat.completions.create(model="m", messages=[*CHAT, *said, *shown(*[cut] * 10_000)])
            too_many.append(caught.value.code)

    found = rollouts.make(["one"], client=agent(run), renderer=seeing, max_images=3).play()
    assert found.failure is None, found.failure
    assert found.stop_reason is StopReason.IMAGE_BUDGET and len(found.turns) == 1 and too_many == ["episode_ended"]
