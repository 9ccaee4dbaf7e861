"""Evaluation through an OpenAI-compatible chat endpoint: a real HTTP server on localhost that answers like one."""

import base64
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console
from vision_processors import encoded
from vision_processors import picture as noise

from turnwise import configure, evaluate
from turnwise.errors import ConfigError, DataError, EngineError
from turnwise.types import Role, StopReason

QUIET = Console(quiet=True)


@contextmanager
def endpoint(answer: Any, models: tuple[str, ...] = ("served",)) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Serves `answer(messages) -> message dict`; yields the base URL and the requests received."""
    received: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def _send(self, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self._send({"object": "list", "data": [{"id": name, "object": "model"} for name in models]})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            received.append(request)
            message = answer(request["messages"])
            reason = "tool_calls" if message.get("tool_calls") else "stop"
            self._send(
                {
                    "model": request["model"],
                    "choices": [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}],
                    "usage": {"prompt_tokens": 7, "completion_tokens": 3},
                }
            )

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", received
    finally:
        server.shutdown()
        server.server_close()


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": "abc", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def config(url: str, folder: Path, *more: str) -> Any:
    return configure("engine=openai", f"engine.base_url={url}", "eval.samples=3", f"runs_dir={folder}", *more)


def test_native_tool_calls_and_feedback(tmp_path: Path) -> None:
    def answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
        if messages[-1]["role"] == "tool":
            return {"content": f"#### {messages[-1]['content']}"}
        return {"content": None, "tool_calls": [call("calculate", {"expression": "6 * 7"})]}

    with endpoint(answer) as (url, received):
        report = evaluate(config(url, tmp_path), console=QUIET)
    (source,) = report.sources.values()
    assert source.failed == 0 and source.calls_by_status == {"ok": 6} and source.user_turns == 1.0
    trajectory = report.trajectories[0]
    assert trajectory.stop_reason is StopReason.USER_ENDED
    roles = [message.role for message in trajectory.messages]
    assert roles == [Role.SYSTEM, Role.USER, *[Role.ASSISTANT, Role.TOOL, Role.ASSISTANT, Role.USER] * 2][: len(roles)]
    assert [tool["function"]["name"] for tool in received[0]["tools"]] == ["calculate", "python"]
    last = max(received, key=lambda request: len(request["messages"]))["messages"]
    asked = next(message for message in last if message.get("tool_calls"))
    replied = next(message for message in last if message["role"] == "tool")
    assert replied["tool_call_id"] == asked["tool_calls"][0]["id"] == "abc"
    assert trajectory.segments == [] and source.render_exact is None, "an endpoint gives no token ids"
    assert source.policy_tokens == 3 * 4 * 3
    assert "model: served" in (report.run / "config.yaml").read_text(), "asked from the endpoint, and written down"


def test_calls_left_in_the_text_are_found_and_sent_back_as_text(tmp_path: Path) -> None:
    text = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "1 + 1"}}\n</tool_call>'

    def answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
        return {"content": "#### 2" if messages[-1]["role"] == "tool" else text}

    with endpoint(answer) as (url, received):
        report = evaluate(config(url, tmp_path, "rollout.interaction=null"), console=QUIET)
    assert report.sources["arithmetic"].calls_by_status == {"ok": 3}
    second = next(request for request in received if request["messages"][-1]["role"] == "tool")["messages"]
    assert second[-2]["content"] == text and "tool_calls" not in second[-2]


def test_arguments_that_are_not_json_are_answered_as_malformed(tmp_path: Path) -> None:
    def answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
        if messages[-1]["role"] == "tool":
            return {"content": "#### 0"}
        broken = call("calculate", {})
        broken["function"]["arguments"] = "{not json"
        return {"content": "", "tool_calls": [broken]}

    with endpoint(answer) as (url, _):
        report = evaluate(config(url, tmp_path, "rollout.interaction=null"), console=QUIET)
    assert report.sources["arithmetic"].calls_by_status == {"malformed": 3}


def test_an_endpoint_that_is_not_there_or_serves_several_models_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="127.0.0.1:9"):
        evaluate(config("http://127.0.0.1:9/v1", tmp_path, "engine.retries=0"), console=QUIET)
    with endpoint(lambda messages: {"content": "x"}, models=("a", "b")) as (url, _):
        with pytest.raises(ConfigError, match="a, b|'a', 'b'"):
            evaluate(config(url, tmp_path), console=QUIET)
    with pytest.raises(ConfigError, match=r"engine\.base_url"):
        evaluate(configure("engine=openai", f"runs_dir={tmp_path}"), console=QUIET)


def test_images_reach_the_endpoint(tmp_path: Path) -> None:
    picture = encoded(noise(8, 8))
    (tmp_path / "cat.png").write_bytes(picture)
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": "<image>How many?"}],
            "images": [{"path": str(tmp_path / name)}],
            "reward_model": {"ground_truth": "2"},
        }
        for name in ("cat.png", "cat.png")
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = ("task=null", f"data.eval_files={tmp_path}/rows.jsonl")
    with endpoint(lambda messages: {"content": "#### 2"}) as (url, received):
        report = evaluate(config(url, tmp_path / "runs", *files), console=QUIET)
        assert report.sources["openai/gsm8k"].accuracy == 1.0 and len(received) == 2
        image, text = received[0]["messages"][0]["content"]
        assert text == {"type": "text", "text": "How many?"}
        assert base64.b64decode(image["image_url"]["url"].removeprefix("data:image/png;base64,")) == picture
        (tmp_path / "cat.png").write_bytes(b"no picture")
        with pytest.raises(DataError, match="cat.png is not a PNG"):
            evaluate(config(url, tmp_path / "more", *files), console=QUIET)
    assert not (tmp_path / "more").exists()


def sent_images(message: dict[str, Any]) -> list[Image.Image]:
    """Those of one message of a request."""
    urls = [part["image_url"]["url"] for part in message["content"] if part["type"] == "image_url"]
    return [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]


def test_a_tools_images_follow_its_words_as_a_users_and_budgets_hold(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(encoded(noise(300, 200)))
    row = {
        "data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "<image>How many?"}],
        "images": [{"path": str(tmp_path / "cat.png")}], "reward_model": {"ground_truth": "2"},
    }  # fmt: skip
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    settings = ("task=null", f"data.eval_files={tmp_path}/rows.jsonl", "rollout.tools=[image_zoom]")

    def answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
        return {"content": None, "tool_calls": [call("image_zoom", {"bbox_2d": [10, 10, 210, 160]})]}

    with endpoint(answer) as (url, received):
        limits = ("chat.max_pixels=9600", "rollout.max_images=3")
        report = evaluate(config(url, tmp_path / "runs", *settings, *limits), console=QUIET)
        assert [one.stop_reason for one in report.trajectories] == [StopReason.IMAGE_BUDGET]
        last = received[-1]["messages"]
        assert [one["role"] for one in last] == ["user", *["assistant", "tool", "user"] * 2]
        first, *crops = [sent_images(one) for one in last if one["role"] == "user"]
        assert [one.size for one in first] == [(120, 80)]  # in its shape
        for shown in crops:
            assert len(shown) == 1 and 9000 < shown[0].width * shown[0].height <= 9600
        assert all(isinstance(one["content"], str) and one["tool_call_id"] for one in last if one["role"] == "tool")
        with pytest.raises(DataError, match="has 2 images, and rollout.max_images=1"):
            row["prompt"] = [{"role": "user", "content": "<image><image>How many?"}]
            row["images"] = [{"path": str(tmp_path / "cat.png")}] * 2
            (tmp_path / "rows.jsonl").write_text(json.dumps(row))
            evaluate(config(url, tmp_path / "more", *settings, "rollout.max_images=1"), console=QUIET)
    assert not (tmp_path / "more").exists()


def test_code_that_the_text_spells_is_sent_back_once(tmp_path: Path) -> None:
    """Calls read from the text are in it already, whatever the format."""

    def answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
        done = messages[-1]["role"] == "tool"
        return {"content": f"#### {messages[-1]['content']}" if done else "<code>\nprint(6 * 7)\n</code>"}

    chosen = ("rollout.tools=[python]", "rollout.interaction=null", "chat.tool_format=code")
    with endpoint(answer) as (url, received):
        report = evaluate(config(url, tmp_path, *chosen), console=QUIET)
    assert report.sources["arithmetic"].calls_by_status == {"ok": 3}
    sent = max(received, key=lambda request: len(request["messages"]))["messages"]
    (asked,) = [message for message in sent if message["role"] == "assistant"]
    assert "print(6 * 7)" in asked["content"] and "tool_calls" not in asked
