"""Messages for a chat endpoint: images are sent or refused by name, never left out."""

import base64
import os
from pathlib import Path
from typing import Any

import pytest

from turnwise.chat.calls.tool_format import load_format
from turnwise.errors import DataError
from turnwise.rollout import openai_messages
from turnwise.rollout.openai_messages import check_image, data_url
from turnwise.system.plugins import names_in
from turnwise.types import Image, Message, Role, Text, ToolCall

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 40
URL = "data:image/png;base64," + base64.b64encode(PNG).decode()
SEEN = {"type": "image_url", "image_url": {"url": URL}}


def as_openai(messages: list[Message]) -> list[dict[str, Any]]:
    urls = {image: data_url(image) for message in messages for image in message.images}
    return openai_messages.as_openai(messages, load_format("hermes"), urls)


@pytest.fixture
def picture(tmp_path: Path) -> Image:
    (tmp_path / "cat.png").write_bytes(PNG)
    return Image(str(tmp_path / "cat.png"))


def test_a_users_images_stand_where_they_stood(picture: Image) -> None:
    message = Message(Role.USER, (Text("Is "), picture, Text(" like "), Image(URL), Text("?")))
    (entry,) = as_openai([message])
    assert entry["role"] == "user"
    assert [part["type"] for part in entry["content"]] == ["text", "image_url", "text", "image_url", "text"]
    assert entry["content"][1] == entry["content"][3] == SEEN


def test_text_stays_text() -> None:
    assert as_openai([Message(Role.USER, (Text("a"), Text("b")))]) == [{"role": "user", "content": "ab"}]
    assert as_openai([Message(Role.SYSTEM, "s")]) == [{"role": "system", "content": "s"}]


def test_what_tools_drew_follows_all_their_results(picture: Image) -> None:
    results = [
        Message(Role.TOOL, (Text("one"), picture), tool_call_id="a"),
        Message(Role.TOOL, "two", tool_call_id="b"),
    ]
    entries = as_openai([*results, Message(Role.USER, "Well?")])
    assert entries[:2] == [
        {"role": "tool", "content": "one", "tool_call_id": "a"},
        {"role": "tool", "content": "two", "tool_call_id": "b"},
    ]
    assert entries[2:] == [{"role": "user", "content": [SEEN]}, {"role": "user", "content": "Well?"}]
    assert as_openai(results)[-1] == {"role": "user", "content": [SEEN]}


@pytest.mark.parametrize("role", [Role.SYSTEM, Role.ASSISTANT])
def test_images_of_others_are_refused_by_name(picture: Image, role: Role) -> None:
    with pytest.raises(DataError, match=f"a {role} message holds an image"):
        as_openai([Message(role, (Text("see"), picture))])


def test_images_that_cannot_be_sent_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.png").write_text("not a picture")
    (tmp_path / "large.png").write_bytes(PNG * 10)
    os.mkfifo(tmp_path / "pipe.png")  # whoever opened it would wait for ever
    monkeypatch.setattr(openai_messages, "MAX_IMAGE_BYTES", 100)
    for source, problem in (
        (str(tmp_path / "none.png"), "none.png cannot be read"),
        (str(tmp_path / "text.png"), "text.png is not a PNG"),
        (str(tmp_path / "large.png"), "large.png has"),
        (str(tmp_path), "cannot be read"),
        ("data:image/png;base64,%%%", "cannot be read"),
        (str(tmp_path / "pipe.png"), "not a regular file"),
        ("x" * 5000 + ".png", "cannot be read"),
        ("a\0.png", "cannot be read"),
        ("data:text/plain;base64,aGVsbG8=", "is not a PNG"),
        ("data:image/png;base64," + base64.b64encode(PNG * 10).decode(), "MiB"),
    ):
        for send in (data_url, check_image):
            with pytest.raises(DataError, match=problem):
                send(Image(source))


@pytest.mark.parametrize("head", ["data:text/html;base64,", "data:image/jpeg;base64,", "data:IMAGE/png;a=b;base64,"])
def test_an_image_is_sent_as_what_it_is_whatever_it_is_called(picture: Image, head: str) -> None:
    assert data_url(Image(head + URL.partition(",")[2])) == URL


def test_addresses_are_left_to_the_endpoint_and_file_urls_are_files(picture: Image) -> None:
    assert data_url(Image("https://example.com/cat.png")) == "https://example.com/cat.png"
    check_image(Image("https://example.com/cat.png"))
    assert data_url(Image("file://" + picture.source)) == URL


def test_calls_of_a_prompt_are_given_unless_its_text_spells_them() -> None:
    call = ToolCall("a", "probe", {"x": 1})
    for name in names_in("turnwise.chat.formats"):
        call_format = load_format(name)
        (given,) = openai_messages.as_openai([Message(Role.ASSISTANT, "Let me see.", (call,))], call_format, {})
        assert given["tool_calls"][0]["function"] == {"name": "probe", "arguments": '{"x": 1}'}
        text = f"Let me see.\n{call_format.render_call(call)}"
        (spelled,) = openai_messages.as_openai([Message(Role.ASSISTANT, text, (call,))], call_format, {})
        assert spelled == {"role": "assistant", "content": text}, name
