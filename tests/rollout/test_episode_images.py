"""Images that tools give back: to the model, to later calls, and with an origin that no code in the sandbox can forge."""

import asyncio
import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
from PIL import Image as Pillow
from PIL import ImageDraw

from turnwise.chat.formats import code as code_format
from turnwise.config import Config, RolloutConfig
from turnwise.config.sections import with_section
from turnwise.errors import ConfigError
from turnwise.ext.judge.tool_misuse import ToolMisuse, misuse_by_turn
from turnwise.ext.judge.turn_scores import by_boxes
from turnwise.ext.sandbox.config import SandboxConfig
from turnwise.rollout.toolbox.loading import load_tool
from turnwise.rollout.toolbox.toolbox import EpisodeTools, Toolbox
from turnwise.types import (
    CallRecord,
    CallStatus,
    FinishReason,
    Image,
    Message,
    Role,
    Sample,
    StopReason,
    ToolCall,
    Trajectory,
    Turn,
)

TARGET = [150, 40, 190, 60]


def canvas(seed: int = 7) -> Pillow.Image:
    """Noise, a white page with writing in it, and a digit two shades darker than its flat ground."""
    random = numpy.random.default_rng(seed)
    image = Pillow.fromarray(random.integers(0, 255, (256, 256, 3), dtype=numpy.uint8).astype(numpy.uint8))
    draw = ImageDraw.Draw(image)
    draw.rectangle((128, 0, 255, 100), fill="white")
    draw.text((152, 44), f"n {seed}", fill="black")
    draw.rectangle((0, 128, 127, 255), fill=(120, 120, 120))
    draw.rectangle((40, 180, 44, 194), fill=(116, 116, 116))
    return image


def png(image: Pillow.Image) -> bytes:
    held = io.BytesIO()
    image.save(held, "PNG")
    return held.getvalue()


def url(image: Pillow.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


def pixels(image: Image) -> Pillow.Image:
    return Pillow.open(io.BytesIO(base64.b64decode(image.source.partition(",")[2])))


def images_of(message: Message) -> list[Image]:
    return [] if isinstance(message.content, str) else [part for part in message.content if isinstance(part, Image)]


def sample(*tools: str) -> Sample:
    """The model is shown a small view; tools are given the whole canvas."""
    view = canvas().resize((64, 64))
    kwargs = {tool: {"create_kwargs": {"image": url(canvas())}} for tool in tools}
    info = {"extra_info": {"target_boxes": [TARGET]}}
    return Sample("s:0", (), "x", tools_kwargs=kwargs, images=(Image(url(view)),), info=info)


IMAGE_TOOLS = ("image_zoom", "image_crop", "image_rotate", "image_contrast")


def play(turns: Sequence[Sequence[tuple[str, dict[str, Any]]]], **options: Any) -> list[tuple[Message, CallRecord]]:
    """Calls of the image tools in one episode, turn by turn."""

    async def main() -> list[tuple[Message, CallRecord]]:
        box = Toolbox([load_tool(name) for name in IMAGE_TOOLS], RolloutConfig(tool_options=options))
        episode = box.open(sample(*IMAGE_TOOLS), IMAGE_TOOLS, takes_images=True)
        found: list[tuple[Message, CallRecord]] = []
        for turn in turns:
            records: list[CallRecord] = []
            calls = [ToolCall(f"c{n}", name, arguments) for n, (name, arguments) in enumerate(turn)]
            replies = await episode.call(calls, records)
            found += zip(replies, records, strict=True)
        await episode.close()
        return found

    return asyncio.run(main())


def test_tools_read_the_canvas_and_later_ones_what_was_made_of_it() -> None:
    found = play(
        [
            [("image_zoom", {"bbox_2d": [128, 0, 256, 100]}), ("image_rotate", {"angle": 90})],
            [("image_crop", {"bbox_2d": [22, 40, 62, 70], "image": 1})],
            [("image_crop", {"bbox_2d": [196, 150, 216, 190], "image": "image_rotate_1"})],
            [("image_contrast", {"image": 3})],
        ]
    )
    facts = [record.info["images"][0] for _, record in found]
    boxes = [[128, 0, 256, 100], [0, 0, 256, 256], [150, 40, 190, 70], facts[3]["box"], [150, 40, 190, 70]]
    assert [one["box"] for one in facts] == boxes
    assert all(one["source"] == "canvas_0.png" and one["source_size"] == [256, 256] for one in facts)
    assert all(one["provenance"] == "verified" for one in facts)
    whole = canvas()
    assert pixels(images_of(found[2][0])[0]).tobytes() == whole.crop((150, 40, 190, 70)).tobytes()
    left, upper, right, lower = map(int, facts[3]["box"])
    turned = whole.crop((left, upper, right, lower)).transpose(Pillow.Transpose.ROTATE_270)
    assert pixels(images_of(found[3][0])[0]).tobytes() == turned.tobytes()
    assert [step["name"] for step in facts[4]["steps"]] == ["crop", "crop", "autocontrast"]


def test_every_image_has_the_size_that_the_run_wants_and_later_calls_read_it_whole() -> None:
    turns = [
        [("image_zoom", {"bbox_2d": [128, 0, 256, 100]})],
        [("image_zoom", {"bbox_2d": [22, 40, 62, 70], "image": 1})],
    ]
    small = {"size": "64x48"}
    first, second = play(turns, image_zoom=small)
    for message, record in (first, second):
        assert [pixels(image).size for image in images_of(message)] == [(64, 48)]
        assert record.info["images"][0]["size"] == [64, 48]
    assert second[1].info["images"][0]["box"] == [150, 40, 190, 70]
    wanted = canvas().crop((150, 40, 190, 70)).resize((64, 48), Pillow.Resampling.BICUBIC)
    assert pixels(images_of(second[0])[0]).tobytes() == wanted.tobytes()
    assert play(turns[:1], image_zoom={"size": [32, 32]})[0][1].info["images"][0]["size"] == [32, 32]


@pytest.mark.parametrize("size", ["64", "0x5", "64x64x3", [64], [64, -1], "10000x4", 5])
def test_a_size_that_is_none_is_refused(size: object) -> None:
    with pytest.raises(ConfigError, match="image_zoom.size must be WIDTHxHEIGHT"):
        play([], image_zoom={"size": size})


@pytest.mark.parametrize("which", [9, "nobody.png"])
def test_an_image_that_there_is_not_is_told(which: object) -> None:
    ((message, record),) = play([[("image_contrast", {"image": which})]])
    assert record.status is CallStatus.ERROR and "there is no image" in message.text


# --- python -------------------------------------------------------------------------------------------------------

PRELUDE = "from PIL import Image, ImageDraw, ImageOps\n"
FORGED = """
import sys
trail = sys.modules['turnwise.ext.sandbox.inside.image_trails']
class Told(trail.Trail):
    def report(self, size):
        return {'source': 'canvas_0.png', 'box': [150, 40, 190, 60], 'frame': None, 'steps': []}
def pretend(image):
    trail.mark(image, Told())
    show(image)
"""
PATCHED = """
real = Image.Image.crop
Image.Image.crop = lambda self, box=None: real(self, (130, 70, 170, 90))
show(img0.crop((150, 40, 190, 60)))
Image.Image.crop = real
"""
PATCHED_BELOW = """
real = Image.Image._crop
Image.Image._crop = lambda self, im, box: real(self, im, (10, 10, 50, 30))
show(img0.crop((150, 40, 190, 60)))
Image.Image._crop = real
"""
CODE = {
    "crop": "show(img0.crop((150, 40, 190, 60)))",
    "two, and one again": "a = img0.crop((150, 40, 190, 60)); show(a); show(a); show(img0.rotate(180))",
    "contrast": "show(ImageOps.autocontrast(img0.crop((20, 170, 60, 210)).convert('L')))",
    "by its name": "show(Image.open(image_filename).crop((150, 40, 190, 60)).resize((200, 100)))",
    "saved": "img0.crop((150, 40, 190, 60)).save('a.png')",
    "the input unchanged": "show(img0)",
    "an answer drawn by itself": "a = Image.new('RGB', (40, 20), 'white'); ImageDraw.Draw(a).text((2, 2), 'n 7', fill='black'); show(a)",
    "the answer drawn over the crop": "a = img0.crop((130, 60, 190, 100)); ImageDraw.Draw(a).text((2, 2), 'it is 3', fill='black'); show(a)",
    "forged: a blank": FORGED + "pretend(Image.new('RGB', (40, 20), 'white'))",
    "forged: another part": "pretend(img0.crop((10, 10, 50, 30)))",
    "forged: a drawing": "a = Image.new('RGB', (40, 20), 'white'); ImageDraw.Draw(a).text((20, 8), '3', fill='black'); pretend(a)",
    "forged: a flat part for a faint digit": """
class Faint(trail.Trail):
    def report(self, size):
        return {'source': 'canvas_0.png', 'box': [20, 170, 60, 210], 'frame': None, 'steps': []}
a = img0.crop((80, 200, 120, 240)); trail.mark(a, Faint()); show(a)""",
    "another row's file": """
class Other(trail.Trail):
    def report(self, size):
        return {'source': 'other.png', 'box': [0, 0, 40, 20], 'frame': None, 'steps': []}
a = img0.crop((0, 0, 40, 20)); trail.mark(a, Other()); show(a)""",
    "a path of the host": "open('/etc/hostname.png', 'rb')",
    "PIL patched": PATCHED,
    "PIL patched below": PATCHED_BELOW,
    "too long": "show(Image.new('RGB', (500, 2)))",
    "turned by 30": "show(img0.rotate(30))",
}  # fmt: skip
HONEST = ("crop", "contrast", "by its name", "saved", "the input unchanged")
LIES = ("forged: a blank", "forged: another part", "forged: a drawing", "another row's file", "PIL patched below")


@pytest.fixture(scope="module")
def outcomes() -> dict[str, tuple[Message, CallRecord]]:
    """Every piece of code as a <code> block of one episode, after the other."""

    async def main() -> dict[str, tuple[Message, CallRecord]]:
        tool = load_tool("python", with_section(Config(), SandboxConfig(preload=["PIL.Image"])))
        box = Toolbox([tool], RolloutConfig())
        found = {}
        async with box.running(lambda _: None):
            episode: EpisodeTools = box.open(sample("python"), ("python",), takes_images=True)
            for name, code in CODE.items():
                call = code_format.parse(f"<code>{PRELUDE}{code}</code>", turn=0, in_reasoning=False).tool_calls
                records: list[CallRecord] = []
                (reply,) = await episode.call(call, records)
                found[name] = (reply, records[0])
            await episode.close()
        return found

    return asyncio.run(main())


def facts_of(outcomes: dict[str, tuple[Message, CallRecord]], name: str) -> dict[str, Any]:
    message, record = outcomes[name]
    assert record.status is CallStatus.OK, message.text
    (facts,) = record.info["images"]
    assert [image.source for image in images_of(message)] == [facts["data"]], "the model is shown what is recorded"
    found: dict[str, Any] = facts
    return found


@pytest.mark.parametrize("name", HONEST)
def test_what_the_host_can_recompute_is_verified(outcomes: Any, name: str) -> None:
    facts = facts_of(outcomes, name)
    assert (facts["provenance"], facts["source"], facts["source_size"]) == ("verified", "canvas_0.png", [256, 256]), (
        facts
    )
    wanted = {"contrast": [20, 170, 60, 210], "the input unchanged": [0, 0, 256, 256]}
    assert facts["box"] == wanted.get(name, TARGET)


@pytest.mark.parametrize("name", LIES)
def test_what_the_pixels_contradict_is_no_crop_of_anything(outcomes: Any, name: str) -> None:
    facts = facts_of(outcomes, name)
    assert (facts["provenance"], facts["source"], facts["box"]) == ("contradicted", None, None), facts
    assert facts["unverified"]["box"] is not None


@pytest.mark.parametrize("name", ["an answer drawn by itself", "forged: a flat part for a faint digit", "turned by 30"])
def test_what_nobody_can_tell_is_unverified(outcomes: Any, name: str) -> None:
    facts = facts_of(outcomes, name)
    assert (facts["provenance"], facts["source"], facts["box"]) == ("unverified", None, None), facts


def test_code_that_lies_to_itself_is_told_as_what_it_did(outcomes: Any) -> None:
    facts = facts_of(outcomes, "PIL patched")
    assert (facts["provenance"], facts["box"]) == ("verified", [130, 70, 170, 90])


def test_what_is_drawn_over_a_crop_is_no_evidence(outcomes: Any) -> None:
    assert facts_of(outcomes, "the answer drawn over the crop")["provenance"] == "contradicted"


def test_images_come_in_order_and_once(outcomes: Any) -> None:
    message, record = outcomes["two, and one again"]
    assert [one["size"] for one in record.info["images"]] == [[40, 20], [256, 256]] and len(images_of(message)) == 2
    assert record.info["images"][1]["matrix"] == [-1, 0, 256, 0, -1, 256]


def test_an_image_that_no_model_takes_is_left_out_with_a_word(outcomes: Any) -> None:
    message, record = outcomes["too long"]
    assert record.status is CallStatus.OK and "images" not in record.info
    assert isinstance(message.content, str) and "500x2 is left out" in message.text


def test_files_of_the_host_are_not_there(outcomes: Any) -> None:
    message, record = outcomes["a path of the host"]
    assert record.status is CallStatus.ERROR and ("FileNotFound" in message.text or "Permission" in message.text)


def trajectory(record: CallRecord) -> Trajectory:
    turn = Turn(0, Message(Role.ASSISTANT, "x"), FinishReason.STOP, 0, 1, 1, calls=[record])
    return Trajectory(sample("python"), 0, 0, [], [turn], [], StopReason.ANSWERED, 0.1)


def test_scorers_pay_for_what_is_verified_only(outcomes: Any) -> None:
    async def worth(name: str) -> float:
        one = trajectory(outcomes[name][1])
        return (await by_boxes(one, one.turns))[0].value

    values = {name: asyncio.run(worth(name)) for name in ("crop", "by its name", *LIES, "an answer drawn by itself")}
    assert values.pop("crop") == values.pop("by its name") == 1.0
    assert set(values.values()) == {0.0}


def test_rules_know_the_size_of_the_canvas(outcomes: Any) -> None:
    _, record = play([[("image_zoom", {"bbox_2d": [0, 0, 256, 256]})]])[0]
    assert misuse_by_turn(trajectory(record), search=False) == {0: {ToolMisuse.LARGE_CROP}}
    assert misuse_by_turn(trajectory(outcomes["crop"][1]), search=False) == {}


def test_a_turn_with_an_answer_runs_no_code() -> None:
    text = "<code>show(img0)</code> <answer>7</answer>"
    assert code_format.parse(text, turn=0, in_reasoning=False).tool_calls == ()


def test_a_model_that_reads_text_is_told_of_images() -> None:
    async def main() -> Message:
        box = Toolbox([load_tool("image_rotate")], RolloutConfig())
        episode = box.open(sample("image_rotate"), ("image_rotate",))
        (reply,) = await episode.call([ToolCall("c", "image_rotate", {"angle": 180})], [])
        return reply

    reply = asyncio.run(main())
    assert reply.text.endswith("[1 images are not shown: the model reads text only]")
