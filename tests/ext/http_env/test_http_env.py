"""Environments over HTTP, against the small server and hostile ones: sessions end on every path, answers are checked."""

import asyncio
import contextlib
import itertools
import json
import re
import runpy
from pathlib import Path

import pytest
from server import GuessNumber, make_app
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from turnwise.config import Config, RolloutConfig
from turnwise.errors import ConfigError
from turnwise.rollout.routing import Plan
from turnwise.rollout.toolbox.toolbox import Toolbox
from turnwise.rollout.users.loading import Users
from turnwise.scoring.event_loop_resources import close_loop_resources
from turnwise.types import CallStatus, Role, StopReason


def bisect(request):
    """Halves the range by what the game said so far."""
    low, high = 1, 100
    answers = re.findall(r"(\d+)[^0-9]*?(Higher|Lower)\.", request.text.partition("higher or lower")[2])
    for guess, hint in answers:
        low, high = (int(guess) + 1, high) if hint == "Higher" else (low, int(guess) - 1)
    return str((low + high) // 2)


def named(sample, name="guess", index=3, **fields):
    return sample(f"env:{index}", info={"extra_info": {"name": name, "index": index}}, **fields)


def with_env(url, **options):
    return {"agent": "http_env", "agent_options": {"url": url, "retries": 0, **options}}


def run(app, serving, play):
    """What `play(url)` gives while the app is served."""

    async def main():
        async with serving(app) as url:
            try:
                return await play(url)
            finally:
                await close_loop_resources()

    return asyncio.run(main())


def test_a_game_is_played_to_its_end(rollouts, sample, serving):
    app = make_app()

    async def play(url):
        rollout = rollouts.make(bisect, samples=[named(sample)], **with_env(url))
        trajectory = await rollout.episode()
        rollout.check_tokens(trajectory)
        return trajectory

    trajectory = run(app, serving, play)
    record = trajectory.facts.environment
    assert trajectory.failure is None and trajectory.stop_reason is StopReason.ANSWERED
    assert record.finished and record.metrics["won"] == 1.0 and record.metrics["guesses"] == len(trajectory.turns)
    assert record.reward == pytest.approx(1 - 0.05 * (len(trajectory.turns) - 1)) == trajectory.turns[-1].user_score
    assert trajectory.messages[0].text.startswith("I think of a number"), "the environment's prompt, not the row's"
    assert trajectory.turns[-1].replies[0].text == "Right!" and "Right!" not in trajectory.messages[-1].text
    assert app.state.sessions.counts == {"started": 1, "finished": 1, "cancelled": 0, "forgotten": 0}


def test_tools_of_the_environment_are_shown_and_run_by_it(rollouts, sample, serving, call):
    app = make_app()

    async def play(url):
        said = ["Hello.", call("price", item="hat"), call("buy", item="hat", dollars=12)]
        rollout = rollouts.make(said, samples=[named(sample, "shop")], **with_env(url))
        trajectory = await rollout.episode()
        rollout.check_tokens(trajectory)
        return trajectory, rollout.sampler.requests[0].token_ids

    trajectory, prompt = run(app, serving, play)
    assert "Buy one item for so many dollars" in rollouts.renderer.tokenizer.decode(prompt)
    assert [turn.replies[0].text for turn in trajectory.turns] == ["Please use the tools.", "12", "Bought."]
    assert trajectory.turns[1].replies[0].role is Role.TOOL and trajectory.turns[1].replies[0].name == "price"
    assert [record.status for record in trajectory.calls] == [CallStatus.UNKNOWN] * 2
    assert trajectory.facts.environment.reward == 1.0 and not app.state.sessions.open


def test_a_turn_with_a_call_that_cannot_be_read_reaches_no_environment(rollouts, sample, serving, call):
    app = make_app()

    async def play(url):
        broken = call("buy", item="hat", dollars=12) + '\n<tool_call>\n{"name": \n</tool_call>'
        said = [broken, call("buy", item="hat", dollars=12)]
        return await rollouts.make(said, samples=[named(sample, "shop")], **with_env(url)).episode()

    first, second = run(app, serving, play).turns
    assert [record.status for record in first.calls] == [CallStatus.MALFORMED, CallStatus.REFUSED]
    assert len(first.replies) == 2 and all(reply.text.startswith("Error: ") for reply in first.replies)
    assert second.user_score == 1.0


@pytest.mark.parametrize("how", ["turns", "truncated", "engine", "seconds", "cancelled"])
def test_a_session_is_cancelled_on_every_path(rollouts, sample, serving, how):
    app = make_app()

    async def play(url):
        settings = {
            "turns": {"max_assistant_turns": 2},
            "truncated": {"max_tokens": 1},
            "seconds": {"max_seconds": 0.3},
        }.get(how, {})
        rollout = rollouts.make(["no number"], samples=[named(sample)], **settings, **with_env(url))
        if how == "engine":
            rollout.sampler.error, rollout.sampler.error_at = RuntimeError("the engine broke"), 1
        if how in ("seconds", "cancelled"):
            rollout.sampler.hang_at = 1
        episode = asyncio.ensure_future(rollout.episode())
        if how == "cancelled":
            await rollout.sampler.generating.wait()
            episode.cancel()
        await asyncio.wait((episode,))
        return episode

    episode = run(app, serving, play)
    if how == "engine":
        assert "the engine broke" in str(episode.exception())
    elif how == "cancelled":
        assert episode.cancelled()
    else:
        ends = {
            "turns": StopReason.ASSISTANT_TURN_BUDGET,
            "truncated": StopReason.TURN_TRUNCATED,
            "seconds": StopReason.TIME_BUDGET,
        }
        assert episode.result().stop_reason is ends[how]
        assert not episode.result().facts.environment.finished
    assert app.state.sessions.counts == {"started": 1, "finished": 0, "cancelled": 1, "forgotten": 0}


# --- servers that misbehave ---------------------------------------------------------------------------------------


class Server:
    """Answers as it is told; keeps the paths it was asked, and can hold an answer back."""

    def __init__(self, *, start=None, interact=None, echo=False, session="s1"):
        self.asked, self.echo, self.session = [], echo, session
        self.start = start or {"messages": [{"role": "user", "content": "Go."}], "tools": [], "metrics": {}}
        self.interact = iter(interact or itertools.repeat({"messages": [], "finish": True, "reward": 1}))
        self.hold = asyncio.Event()
        self.hold.set()
        self.arrived = asyncio.Event()
        paths = ("/start_sample", "/interact", "/cancel")
        self.app = Starlette(routes=[Route(path, self.answer, methods=["POST"]) for path in paths])

    async def answer(self, request):
        body = await request.json()
        self.asked.append((request.url.path, request.headers.get("session_id"), body))
        self.arrived.set()
        await self.hold.wait()
        headers = {"idempotency-key": request.headers["idempotency-key"]} if self.echo else {}
        if request.url.path == "/start_sample":
            headers |= {} if self.session is None else {"session_id": self.session}
            return self.make(self.start, headers)
        return self.make(next(self.interact) if request.url.path == "/interact" else {}, headers)

    def make(self, found, headers):
        if isinstance(found, int):
            return JSONResponse({"error": "no"}, found, headers)
        if isinstance(found, str):
            return Response(found, 200, headers)
        return Response(json.dumps(found), 200, headers)

    @property
    def paths(self):
        return [path for path, _, _ in self.asked]


GO = {"messages": [{"role": "user", "content": "Again."}], "finish": False}
DONE = {"messages": [], "finish": True, "reward": 0.5}


def play_with(make, serving, rollouts, sample, **options):
    async def main():
        server = make()
        async with serving(server.app) as url:
            rollout = rollouts.make(["A", "B"], samples=[named(sample)], **with_env(url, **options))
            try:
                return server, await rollout.episode()
            finally:
                await close_loop_resources()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"session": None}, "names no session in the header session_id"),
        ({"session": "s\xe9"}, "names no session in the header session_id"),
        ({"start": "{"}, "something that is not JSON"),
        ({"start": [1]}, "answered with a list, not an object"),
        ({"start": {"messages": [{"role": "bot", "content": "a"}]}}, "unknown role 'bot'"),
        ({"start": {"tools": [{"type": "function"}]}}, "a schema is"),
        ({"start": {"tools": "all"}}, "tools that are not a list"),
        ({"start": 404}, "answered 404"),
        ({"interact": [{**GO, "finish": "no"}]}, "finish is 'no', not true or false"),
        ({"interact": ['{"finish": true, "reward": NaN}']}, "reward is nan, not a finite number"),
        ({"interact": [{**DONE, "metrics": {"a": "b"}}]}, "metric 'a' is 'b', not a finite number"),
        ({"interact": [{"messages": [], "finish": False}]}, "neither finished nor said anything"),
        ({"interact": [{**GO, "messages": [{"role": "assistant", "content": "I am you"}]}]}, "sent an assistant message"),
        ({"interact": [{**GO, "messages": [{"role": "tool", "tool_call_id": "x", "content": "a"}]}]},
         "answers the call 'x', which is not open"),
        ({"interact": [{**GO, "messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]}]}, "not a data URL"),
        ({"interact": [500]}, "answered 500"),
    ],
)  # fmt: skip
def test_wrong_answers_fail_the_episode_by_name_and_end_the_session(rollouts, sample, serving, given, words):
    server, trajectory = play_with(lambda: Server(**given), serving, rollouts, sample)
    assert trajectory.stop_reason is StopReason.FAILED and words in trajectory.failure
    began = given.get("session", "s1") == "s1" and not isinstance(given.get("start"), str | int | list)
    finished = any(isinstance(one, str) or one == {**DONE, "metrics": {"a": "b"}} for one in given.get("interact", []))
    assert server.paths[-1] == "/cancel" if began and not finished else "/cancel" not in server.paths


def test_a_lost_answer_is_not_asked_for_twice_unless_the_server_keeps_it(rollouts, sample, serving):
    server, trajectory = play_with(lambda: Server(interact=[500, DONE]), serving, rollouts, sample, retries=3)
    assert "answered 500" in trajectory.failure and server.paths == ["/start_sample", "/interact", "/cancel"]
    server, trajectory = play_with(
        lambda: Server(interact=[500, DONE], echo=True), serving, rollouts, sample, retries=3
    )
    assert trajectory.failure is None and server.paths == ["/start_sample", "/interact", "/interact"]
    server, trajectory = play_with(lambda: Server(interact=[503, DONE]), serving, rollouts, sample, retries=3)
    assert trajectory.failure is None, "503 says that it was not served"
    assert server.asked[1][1] == "s1" and server.asked[1][2] == {"messages": [{"role": "assistant", "content": "A"}]}


def test_an_episode_that_leaves_while_its_session_starts_cancels_it_all_the_same(rollouts, sample, serving):
    async def main():
        server = Server()
        server.hold.clear()
        async with serving(server.app) as url:
            rollout = rollouts.make(["A"], samples=[named(sample)], **with_env(url))
            episode = asyncio.ensure_future(rollout.episode())
            await server.arrived.wait()
            episode.cancel()
            await asyncio.sleep(0)
            server.hold.set()
            await asyncio.wait((episode,))
            await close_loop_resources()
        return server, episode

    server, episode = asyncio.run(main())
    assert episode.cancelled() and server.paths == ["/start_sample", "/cancel"] and server.asked[1][1] == "s1"


def test_no_server_and_no_name_fail_the_episode(rollouts, sample):
    trajectory = rollouts.make(["A"], samples=[named(sample)], **with_env("http://127.0.0.1:1")).play()
    assert "http_env: http://127.0.0.1:1/start_sample: ConnectError" in trajectory.failure
    trajectory = rollouts.make(["A"], samples=[sample()], **with_env("http://127.0.0.1:1")).play()
    assert "needs extra_info.name and extra_info.index" in trajectory.failure


def test_a_refused_token_stops_the_run(rollouts, sample, serving):
    with pytest.raises(ConfigError, match="answered 401"):
        run(make_app(token="secret"), serving, lambda url: rollouts.make(["A"], samples=[named(sample)],
                                                                        **with_env(url)).episode())  # fmt: skip


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "needs rollout.agent_options={url"),
        ({"url": "ftp://a"}, "url='ftp://a' must be like"),
        ({"url": "http://a", "retrys": 1}, "agent loop 'http_env': unknown option 'retrys': did you mean 'retries'"),
        ({"url": "http://a", "timeout": -1}, "timeout: Input should be greater than 0"),
    ],
)
def test_wrong_options_are_refused_before_the_run(sample, options, words):
    config = RolloutConfig(agent="http_env", agent_options=options)
    with pytest.raises(ConfigError, match=words):
        Plan([sample()], Config(rollout=config), Toolbox([], config), Users(Config(rollout=config)))


def test_options_that_no_loop_takes_are_refused(sample):
    config = RolloutConfig(agent="tool_calling", agent_options={"url": "http://a"})
    with pytest.raises(ConfigError, match="agent loop tool_calling: unknown option 'url': it takes none"):
        Plan([sample()], Config(rollout=config), Toolbox([], config), Users(Config(rollout=config)))


def test_games_are_the_same_for_an_index():
    assert GuessNumber(3)._number == GuessNumber(3)._number
    assert len({GuessNumber(index)._number for index in range(50)}) > 20


def test_many_sessions_at_once_leave_nothing_behind(serving_in_a_thread):
    """The measurement of benchmarks/sessions.py with fewer of them."""
    app = make_app()

    @contextlib.asynccontextmanager
    async def opened():
        yield app

    measure = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "sessions.py"))["measure"]
    with serving_in_a_thread(opened) as url:
        found = asyncio.run(measure(url, 50))
    assert (found.most_open, found.finished, found.given_up, found.cancelled) == (50, 40, 5, 5)
    assert found.after.sessions == 0 and found.after.tasks == found.before.tasks
    assert app.state.sessions.counts == {"started": 50, "finished": 40, "cancelled": 10, "forgotten": 0}
