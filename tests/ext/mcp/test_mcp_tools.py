"""Tools of MCP servers against a real one: both transports, schemas, images, errors, its death, and no process left."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")

from turnwise.config import RolloutConfig
from turnwise.errors import ConfigError, EpisodeError, PluginError
from turnwise.ext.mcp import tools as mcp_tools
from turnwise.ext.mcp.answers import read_result
from turnwise.ext.mcp.config import read_entry
from turnwise.ext.mcp.tools import open_mcp_tools
from turnwise.rollout.toolbox.files import load_tools
from turnwise.rollout.toolbox.toolbox import Toolbox
from turnwise.types import CallRecord, CallStatus, Message, Role, Sample, ToolCall

SERVER = str(Path(__file__).with_name("mcp_server.py"))
STDIO = {"command": sys.executable, "args": [SERVER]}
SAMPLE = Sample("test:0", (Message(Role.USER, "What is a pen?"),), "shop")

Play = Callable[..., list[tuple[CallRecord, str]]]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with subprocess.Popen([sys.executable, SERVER, "http"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/mcp"
        process.kill()


def run(tools: list[Any], play: Callable[[Callable[..., Awaitable[Any]]], Awaitable[Any]]) -> Any:
    """Play in a toolbox that is running; `call(name, **arguments)` gives (record, what the model reads)."""

    async def main() -> Any:
        toolbox = Toolbox(tools, RolloutConfig())
        async with toolbox.running(lambda line: None):
            episode = toolbox.open(SAMPLE, toolbox.common)

            async def call(name: str, **arguments: Any) -> tuple[CallRecord, str]:
                records: list[CallRecord] = []
                (message,) = await episode.call([ToolCall("c", name, arguments)], records)
                return records[0], message.text

            try:
                return await play(call)
            finally:
                await episode.close()

    return asyncio.run(main())


def alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def test_a_process_serves_its_tools_and_is_gone_afterwards(monkeypatch):
    monkeypatch.setenv("SHOP_KEY", "opensesame")
    entry = {"mcp": {**STDIO, "env": {"SHOP_MODE": "fast"}, "env_from": ["SHOP_KEY"]}}
    tools = open_mcp_tools({**entry, "config": {"type": "mcp", "timeout": 20}})
    total = next(tool for tool in tools if tool.name == "total")
    order = total.schema["function"]["parameters"]["$defs"]["Order"]
    assert order["properties"]["counts"]["items"] == {"type": "integer"}, "nested schemas are kept"
    assert total.timeout == 20.0

    async def play(call):
        return [
            await call("price", item="pen"),
            await call("total", order={"item": "pen", "counts": [1, 2]}),
            await call("total", order={"item": "pen", "counts": ["x"]}),
            await call("refuse"),
            await call("secret"),
            await call("pid"),
        ]

    price, total, bad, refused, secret, pid = run(tools, play)
    assert price[1] == "3"
    assert total[0].info["structured"] == {"items": 3}
    assert bad[0].status is CallStatus.BAD_ARGUMENTS
    assert (refused[0].status, refused[1]) == (CallStatus.ERROR, "Error: the shop is closed")
    assert secret[1] == "opensesame fast"
    assert not alive(int(pid[1]))


def test_an_address_serves_the_same_tools_and_chosen_ones_only(address):
    tools = open_mcp_tools({"mcp": {"url": address}, "tools": ["price", "picture"]})
    assert [tool.name for tool in tools] == ["price", "picture"]

    async def play(call):
        return await asyncio.gather(*(call("price", item="hat") for _ in range(5)))

    assert [text for _, text in run(tools, play)] == ["12"] * 5


def test_a_server_that_dies_is_seen_and_started_again_once():
    tools = open_mcp_tools({"mcp": STDIO, "tools": ["die", "price", "pid"]})

    async def play(call):
        first = await call("pid")
        died, told = await call("die")
        assert died.status is CallStatus.ERROR
        assert "went away" in told
        second = await call("pid")
        assert second[0].info["reconnects"] == 1
        assert first[1] != second[1]
        await call("die")
        with pytest.raises(EpisodeError, match="second time in a row"):
            await call("die")
        return [int(first[1]), int(second[1])]

    assert not any(alive(pid) for pid in run(tools, play))


def test_an_address_that_goes_away_is_said_and_then_fails_the_episode():
    with subprocess.Popen([sys.executable, SERVER, "http"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}/mcp"
        tools = open_mcp_tools({"mcp": {"url": url}, "tools": ["price", "die"]})

        async def play(call):
            assert (await call("price", item="pen"))[1] == "3"
            died, told = await call("die")
            assert (died.status, "went away" in told) == (CallStatus.ERROR, True)
            with pytest.raises(EpisodeError, match="MCP server"):
                await call("price", item="pen")
            return "done"

        try:
            assert run(tools, play) == "done"
        finally:
            process.kill()


def test_a_call_that_takes_too_long_and_an_episode_that_is_cancelled_leave_nothing(tmp_path):
    tools = open_mcp_tools({"mcp": STDIO, "tools": ["wait", "pid"]})
    tools[0].timeout = 0.2
    pids: list[int] = []

    async def late(call):
        pids.append(int((await call("pid"))[1]))
        return await call("wait", seconds=30), await call("pid")

    (slow, _), after = run(tools, late)
    assert slow.status is CallStatus.TIMEOUT
    assert int(after[1]) == pids[0], "the server serves on"

    async def cancelled(call):
        pids.append(int((await call("pid"))[1]))
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run(tools, cancelled)
    assert not any(map(alive, pids))


def test_a_process_that_never_answers_is_given_up_and_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(mcp_tools, "CONNECT_SECONDS", 0.5)
    mute = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    with pytest.raises(PluginError, match="no answer after 0.5 s|it was stopped"):
        open_mcp_tools({"mcp": {"command": sys.executable, "args": ["-c", mute]}})
    started = (tmp_path / "pid").read_text() if (tmp_path / "pid").exists() else ""
    assert not started or not alive(int(started))


def test_a_process_that_never_lists_its_tools_is_given_up_and_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(mcp_tools, "CONNECT_SECONDS", 2.0)
    silent, mark = tmp_path / "silent.py", tmp_path / "pid"
    silent.write_text(
        "import json, os, sys\n"
        f"open({str(mark)!r}, 'w').write(str(os.getpid()))\n"
        "for line in sys.stdin:\n"
        "    asked = json.loads(line)\n"
        "    if asked.get('method') == 'initialize':\n"
        "        told = {'protocolVersion': asked['params']['protocolVersion'], 'capabilities': {'tools': {}},\n"
        "                'serverInfo': {'name': 'silent', 'version': '1'}}\n"
        "        print(json.dumps({'jsonrpc': '2.0', 'id': asked['id'], 'result': told}), flush=True)\n"
        "    elif asked.get('method') != 'tools/list' and 'id' in asked:\n"
        "        problem = {'code': -32601, 'message': 'unknown'}\n"
        "        print(json.dumps({'jsonrpc': '2.0', 'id': asked['id'], 'error': problem}), flush=True)\n"
    )
    with pytest.raises(PluginError, match="no (answer|list of tools) after 2 s|it was stopped"):
        open_mcp_tools({"mcp": {"command": sys.executable, "args": [str(silent)]}})
    assert not mark.exists() or not alive(int(mark.read_text()))


def test_images_of_a_result_are_taken_and_bad_ones_are_said(address):
    (picture,) = open_mcp_tools({"mcp": {"url": address}, "tools": ["picture"]})

    async def look() -> Any:
        await picture.service.start()
        try:
            session = await picture.open(None)  # type: ignore[arg-type]
            return await session.call({"width": 6})
        finally:
            await picture.service.stop()

    result = asyncio.run(look())
    assert result.text == "a red one"
    assert result.images[0].source.startswith("data:image/png;base64,")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ([{"type": "image", "data": "!!", "mimeType": "image/png"}], "not base64"),
        ([{"type": "image", "data": "aGVsbG8=", "mimeType": "image/png"}], "unknown kind"),
        ([{"type": "image", "data": "iVBORw0KGgo=", "mimeType": "image/png"}] * 9, "at most 8"),
    ],
)
def test_images_that_cannot_be_used_are_errors_of_the_tool(content, problem):
    from mcp.types import CallToolResult

    with pytest.raises(Exception, match=problem):
        read_result(CallToolResult.model_validate({"content": content}), {})


def test_other_content_is_named_and_structured_content_stands_in_for_text():
    from mcp.types import CallToolResult

    audio = {"type": "audio", "data": "aGVsbG8=", "mimeType": "audio/wav"}
    text = {"type": "resource", "resource": {"uri": "file:///a", "text": "inside"}}
    assert read_result(CallToolResult.model_validate({"content": [audio, text]}), {}).text == "[audio left out]\ninside"
    only = CallToolResult.model_validate({"content": [], "structuredContent": {"n": 1}})
    assert read_result(only, {}).text == '{"n": 1}'


def test_verls_form_names_a_file_of_servers_and_a_selection(tmp_path):
    (tmp_path / "servers.json").write_text(
        json.dumps({"mcpServers": {"shop": STDIO, "other": {"url": "http://x/mcp"}}})
    )
    entry = {"mcp": {"mcp_servers_config_path": "servers.json", "tool_selected_list": ["price"]}}
    specs, selected = read_entry(entry, tmp_path)
    assert (list(specs), specs["shop"].args, selected) == (["shop", "other"], (SERVER,), ["price"])


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"mcp": "server.py"}, "describe a server"),
        ({"mcp": {}}, "either a command or a url"),
        ({"mcp": {"command": "x", "url": "http://x"}}, "either a command or a url"),
        ({"mcp": {"url": "file:///etc/passwd"}}, "begins with http"),
        ({"mcp": {"comand": "x"}}, "did you mean 'command'"),
        ({"mcp": {"url": "http://x", "auth_token": "s3cret"}}, "name the variable"),
        ({"mcp": STDIO, "tools": "price"}, "list of names"),
        ({"mcp": {"mcp_servers_config_path": "nowhere.json"}}, "no such file"),
        ({"mcp": STDIO, "config": {"type": "mcp", "timeout": 0}}, "timeout"),
    ],
)
def test_a_wrong_entry_is_one_clear_line(entry, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        open_mcp_tools(entry)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"mcp": {"command": "no-such-program-here"}}, "No such file"),
        ({"mcp": {"command": sys.executable, "args": ["-c", "raise SystemExit('no licence')"]}}, "no licence"),
        ({"mcp": {**STDIO, "env_from": ["SHOP_NOT_SET"]}}, "SHOP_NOT_SET is not set"),
        ({"mcp": STDIO, "class_name": "my_tools.MyMCPTool"}, "MyMCPTool would not be asked"),
        ({"mcp": STDIO, "tools": ["prise"]}, "did you mean 'price'"),
        ({"mcp": {"url": "http://127.0.0.1:9/mcp"}}, "MCP server"),
    ],
)
def test_a_server_that_cannot_be_used_is_said_when_the_config_is_read(entry, problem):
    with pytest.raises(PluginError, match=problem):
        open_mcp_tools(entry)


def test_a_file_of_tools_names_a_server_in_one_entry(tmp_path):
    path = tmp_path / "tools.yaml"
    server = f"{{command: {sys.executable}, args: [{SERVER}]}}"
    path.write_text(f"tools:\n  - mcp: {server}\n    tools: [price, picture]\n    timeout: 25\n    concurrency: 2\n")
    tools = load_tools(str(path))
    assert [(tool.name, tool.timeout, tool.concurrency) for tool in tools] == [("price", 25, 2), ("picture", 25, 2)]

    async def play(call):
        return await call("picture", width=5)

    record, text = run(tools, play)
    assert record.status is CallStatus.OK
    assert text.startswith("a red one")
    assert record.info["images"][0]["data"].startswith("data:image/png")


def rude(kind: str) -> dict[str, Any]:
    command = {"command": sys.executable, "args": [str(Path(__file__).with_name("rude_mcp_server.py")), kind]}
    return {"name": "rude", "mcp": command}


def test_an_error_of_the_server_is_an_answer_whatever_its_number(capfd):
    async def play(call):
        return [await call(name) for name in ("no_city", "no_city", "closed", "no_city", "fine")]

    found = run(open_mcp_tools(rude("good")), play)
    assert [text for _, text in found] == ["Error: no such city", "Error: no such city", "Error: Connection closed",
                                           "Error: no such city", "fine"]  # fmt: skip
    assert all("reconnects" not in (record.info or {}) for record, _ in found)


def test_an_answer_that_cannot_be_read_is_an_error_for_who_asked_and_no_traceback(capfd):
    names = ["surrogate", "deep", "wrong", "bare", "chatty", "fine", "large"]

    async def play(call):
        return await asyncio.gather(*(call(name) for name in names))

    found = dict(zip(names, run(open_mcp_tools(rude("good")), play), strict=True))
    for name in ("surrogate", "deep", "wrong", "bare"):
        record, text = found[name]
        assert record.status is CallStatus.ERROR and "cannot be" in text and "\n" not in text, name
    assert found["chatty"][1] == "ready" and found["fine"][1] == "fine"
    assert found["large"][0].status is CallStatus.OK and len(found["large"][1]) < 100_000
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("properties", "MCP server rude: its list of tools is wrong: tools.0.inputSchema.properties"),
        ("type", "tool 'a': its parameters are not a JSON schema"),
        ("list", "MCP server rude: its list of tools is wrong: "),
        ("nameless", "MCP server rude: its list of tools is wrong: "),
        ("number", "MCP server rude: its list of tools is wrong: "),
        ("empty", "MCP server rude: a tool has no name"),
        ("twice", "MCP server rude: two tools are called 'a'"),
        ("surrogate", "MCP server rude: its answer cannot be read: "),
        ("many", "MCP server rude: 5000 tools; at most 1000 are taken"),
        ("huge", "tool 'a': its schema has more than 200000 characters"),
        ("endless", "tool 'a': its schema refers to"),
    ],
)
def test_a_wrong_list_is_one_line(kind, problem, capfd):
    with pytest.raises(PluginError) as caught:
        Toolbox(open_mcp_tools(rude(kind)), RolloutConfig())
    text = str(caught.value)
    assert text.startswith(problem) and "\n" not in text and len(text) < 400
    assert "Traceback" not in capfd.readouterr().err
