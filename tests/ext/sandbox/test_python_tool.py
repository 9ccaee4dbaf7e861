"""The python tool: one sandbox session per episode, errors the model can act on, and nothing left behind."""

import asyncio
import base64
import io
import tempfile
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from PIL import Image as Pillow

from turnwise.config import Config, RolloutConfig
from turnwise.config.sections import with_section
from turnwise.errors import EpisodeError, ToolError
from turnwise.ext.sandbox.config import SandboxConfig
from turnwise.ext.sandbox.level import SandboxLevel
from turnwise.ext.sandbox.python_tool import PythonTool, input_images
from turnwise.ext.sandbox.results import Picture
from turnwise.ext.sandbox.zygote_process import SandboxUnavailable
from turnwise.rollout.toolbox.loading import load_tool
from turnwise.rollout.toolbox.schema import ArgumentChecker
from turnwise.rollout.toolbox.toolbox import Toolbox
from turnwise.rollout.tools.tool import ToolContext, ToolSession
from turnwise.system.code_blocks import program
from turnwise.types import Image, Sample


@pytest.fixture(autouse=True)
def no_folder_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    yield
    assert list(scratch.iterdir()) == []


def play(body: Callable[[PythonTool], Awaitable[object]], **knobs: object) -> object:
    async def run() -> object:
        tool = PythonTool(sandbox=SandboxConfig(preload=[], **knobs))
        try:
            await tool.start()
            return await body(tool)
        finally:
            await tool.stop()

    return asyncio.run(run())


def context(number: int = 0, *images: Image) -> ToolContext:
    return ToolContext(Sample(f"s{number}", (), "x", images=images), {}, seed=number)


async def say(session: ToolSession, code: str) -> str:
    """What the model reads, an error with its class."""
    try:
        return (await session.call({"code": code})).text
    except ToolError as error:
        return f"ToolError: {error}"


def replies(*codes: str, **knobs: object) -> list[str]:
    async def body(tool: PythonTool) -> list[str]:
        session = await tool.open(context())
        try:
            return [await say(session, code) for code in codes]
        finally:
            await session.close()

    return play(body, **knobs)  # type: ignore[return-value]


def test_variables_live_as_long_as_the_episode() -> None:
    assert replies("x = 6", "print(x * 7)", "x") == ["(no output)", "42", "6"]
    assert replies("x = 6", "'x' in globals()", stateless=True) == ["(no output)", "False"]


def test_an_error_names_the_line_and_keeps_what_was_printed() -> None:
    reply = replies("print('so far')\nvalue = 1\nvalue / 0")[0]
    assert reply.startswith("ToolError: so far\n")
    assert "line 3" in reply and "value / 0" in reply and "ZeroDivisionError" in reply


def test_time_is_limited_and_the_session_goes_on() -> None:
    first, second = replies("x = 1\nwhile True: pass", "x", seconds=0.3)
    assert "stopped after 0.3 s" in first and "keep the values" in first
    assert second == "1"


def test_episodes_do_not_see_each_other_and_have_seeds_of_their_own() -> None:
    async def body(tool: PythonTool) -> list[str]:
        sessions = [await tool.open(context(number)) for number in (1, 1, 2)]
        drawn = [await say(one, "import random\nsecret = 1\nrandom.random()") for one in sessions]
        fourth = await tool.open(context(4))
        drawn.append(await say(fourth, "'secret' in globals()"))
        for one in (*sessions, fourth):
            await one.close()
        return drawn

    one, again, other, seen = play(body)  # type: ignore[misc]
    assert one == again != other
    assert seen == "False"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("print(1)", "print(1)"),
        ("```python\nprint(1)\n```", "print(1)"),
        ("Sure:\n```py\na = 1\n```\nand\n```\nprint(a)\n```", "a = 1\nprint(a)"),
        ("<code>\nprint(1)\n</code>", "print(1)"),
        ("<code>```python\nprint(1)\n```</code>", "print(1)"),
        ("```python\nprint(1)```", "print(1)"),
        ("x = '```'", "x = '```'"),
    ],
)
def test_code_is_taken_out_of_fences_and_tags(text: str, code: str) -> None:
    assert program(text) == code


def test_images_come_in_by_name_and_their_provenance_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    drawing: list[int] = []
    real = Picture.png
    monkeypatch.setattr(Picture, "png", lambda self: drawing.append(threading.get_ident()) or real(self))

    path = tmp_path / "cat.png"
    Pillow.new("RGB", (40, 30), (200, 10, 10)).save(path)

    async def body(tool: PythonTool) -> object:
        session = await tool.open(context(0, Image(str(path))))
        result = await session.call(
            {"code": "from PIL import Image\nshow(Image.open('cat.png').crop((5, 6, 15, 26)))\nimg0.size"}
        )
        await session.close()
        return result

    result = play(body)
    assert "(40, 30)" in result.text and "[image 1: show, 10x20]" in result.text  # type: ignore[attr-defined]
    facts = result.info["images"][0]  # type: ignore[attr-defined]
    assert facts["source"] == "cat.png" and facts["box"] == [5.0, 6.0, 15.0, 26.0]
    assert drawing and threading.get_ident() not in drawing, "PNG is made off the event loop"


LIE = """
import sys
from PIL import Image
trail = sys.modules['turnwise.ext.sandbox.inside.image_trails']
blank = Image.new('RGB', (30, 30), 'blue')
trail.mark(blank, trail.Trail('cat.png', (40, 30), (0.5, 0, 0, 0, 0.5, 0), (('crop', {'box': [0, 0, 15, 15]}),)))
show(blank)
"""


def test_what_a_session_only_claims_of_an_image_is_set_aside(tmp_path: Path) -> None:
    """A judge that pays for crops pays for those that show what they say."""
    from PIL import Image as Pillow

    from turnwise.ext.judge.tool_misuse import images_in
    from turnwise.ext.judge.turn_scores import read_box
    from turnwise.types import CallRecord, CallStatus, ToolCall

    path = tmp_path / "cat.png"
    Pillow.new("RGB", (40, 30), (200, 10, 10)).save(path)

    async def body(tool: PythonTool) -> object:
        session = await tool.open(context(0, Image(str(path))))
        result = await session.call({"code": LIE})
        await session.close()
        return result

    facts = play(body).info["images"][0]  # type: ignore[attr-defined]
    assert (facts["source"], facts["box"], facts["steps"]) == (None, None, [])
    assert facts["unverified"]["source"] == "cat.png" and facts["unverified"]["box"] == [0.0, 0.0, 15.0, 15.0]
    record = CallRecord(ToolCall("call_0", "python", {}), CallStatus.OK, 0.1, info={"images": [facts]})
    assert [read_box(image.get("box")) for image in images_in(record)] == [None]


def test_data_urls_are_read_and_missing_files_end_the_episode(tmp_path: Path) -> None:
    content = base64.b64encode(b"\xff\xd8\xffbytes").decode()
    (found,) = input_images(context(0, Image(f"data:image/jpeg;base64,{content}")))
    assert (found.name, found.data) == ("image_0.jpeg", b"\xff\xd8\xffbytes")
    with pytest.raises(EpisodeError, match="image 0 of the sample cannot be read"):
        input_images(context(0, Image(str(tmp_path / "no.png"))))


def test_verls_name_is_known_and_gets_the_runs_sandbox() -> None:
    chosen = load_tool("code_interpreter", with_section(Config(), SandboxConfig(seconds=3)))
    assert isinstance(chosen, PythonTool) and chosen.name == "code_interpreter"
    assert chosen.schema["function"]["name"] == "code_interpreter"
    assert chosen.timeout > chosen.sandbox.seconds == 3
    with pytest.raises(ToolError):
        ArgumentChecker.of(chosen.schema, chosen.name).check_now({"source": "1"})


def test_a_toolbox_starts_and_stops_it_and_two_can_share_it() -> None:
    said: list[str] = []

    async def body() -> PythonTool:
        tool = load_tool("python", with_section(Config(), SandboxConfig(preload=[])))
        box = Toolbox([tool], RolloutConfig())
        other = Toolbox(box.shared(), RolloutConfig())
        async with box.running(said.append):
            async with other.running(said.append):
                pass
            session = await tool.open(context())
            assert await say(session, "1 + 1") == "2"
            await session.close()
        return tool  # type: ignore[return-value]

    tool = asyncio.run(body())
    assert said[0].startswith("tool python: sandbox level ") and said[0] == said[1]
    with pytest.raises(EpisodeError, match="not started"):
        asyncio.run(tool.open(context()))


def test_a_level_that_cannot_be_had_stops_the_run_before_any_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # no runsc there
    with pytest.raises(SandboxUnavailable, match="L4"):
        play(lambda tool: tool.open(context()), min_level=SandboxLevel.L4)  # type: ignore[arg-type, return-value]


def test_a_package_that_is_not_there_is_named() -> None:
    async def body() -> None:
        await PythonTool(sandbox=SandboxConfig(preload=["no_such_package"])).start()

    with pytest.raises(SandboxUnavailable, match="no_such_package"):
        asyncio.run(body())


def test_the_picture_can_be_written_as_a_file() -> None:
    from PIL import Image as Pillow

    from turnwise.ext.sandbox.results import Picture, Provenance

    picture = Picture("show", "L", (2, 1), b"\x00\xff", Provenance(None, None))
    assert Pillow.open(io.BytesIO(picture.png())).tobytes() == b"\x00\xff"


def test_code_is_not_given_a_file_of_the_host_that_is_no_image(tmp_path: Path) -> None:
    secret = tmp_path / "secret.png"
    secret.write_text("a key of the user's")
    for images, kwargs in (((Image(str(secret)),), {}), ((), {"create_kwargs": {"image": f"file://{secret}"}})):
        sample = Sample("s", (), "x", images=images, tools_kwargs={"python": kwargs})
        with pytest.raises(EpisodeError, match="is not a PNG, JPEG, GIF, WebP or BMP image"):
            input_images(ToolContext(sample, kwargs, 0, ()))


def test_code_is_given_images_as_the_model_sees_them(tmp_path: Path) -> None:
    """Upright: boxes in what the model was shown are boxes in what its code opens."""
    for orientation, size in ((1, (30, 10)), (6, (10, 30))):
        lying = Pillow.new("RGB", (30, 10), "red")
        notes = lying.getexif()
        notes[0x0112] = orientation
        lying.save(tmp_path / "a.jpg", exif=notes)
        (found,) = input_images(context(0, Image(str(tmp_path / "a.jpg"))))
        with Pillow.open(io.BytesIO(found.data)) as seen:
            assert (found.name, seen.size, seen.getexif().get(0x0112, 1)) == ("a.jpg", size, 1)
        assert orientation == 6 or found.data == (tmp_path / "a.jpg").read_bytes()
