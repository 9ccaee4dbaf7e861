"""Users played by a language model: a real HTTP server on localhost that answers like one, and the rule judge."""

import asyncio
import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rule_judge import ChatRequest, completion

from turnwise.config import Config, RolloutConfig
from turnwise.errors import ConfigError, PluginError
from turnwise.rollout.users.loading import Users
from turnwise.scoring.event_loop_resources import close_loop_resources
from turnwise.types import InteractionSpec, StopReason

GOAL = "get the price of blue paint"


@contextlib.contextmanager
def served(answer):
    """Serves `answer(request) -> text, a whole body, or a status`; gives the base URL and the requests received."""
    received = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def _send(self, status, body):
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            self._send(200, {"object": "list", "data": [{"id": "actor", "object": "model"}]})

        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            received.append(request)
            said = answer(request)
            if isinstance(said, int):
                return self._send(said, {"error": "no"})
            if isinstance(said, dict):
                return self._send(200, said)
            choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
            usage = {"prompt_tokens": 7, "completion_tokens": 3}
            return self._send(200, {"model": request["model"], "choices": [choice], "usage": usage})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", received
    finally:
        server.shutdown()
        server.server_close()


def play(rollout):
    async def episode():
        try:
            return await rollout.episode()
        finally:
            await close_loop_resources()

    return asyncio.run(episode())


def with_user(url, **options):
    return {"interaction": "llm_user", "interaction_kwargs": {"base_url": url, "retries": 0, "goal": GOAL, **options}}


def test_it_sees_the_conversation_with_roles_swapped_and_its_words_are_the_users(rollouts, sample, call):
    words = iter(["<think>hm</think>In blue, please.", "Fine. [END]"])
    with served(lambda request: next(words)) as (url, received):
        said = ["<think>a secret</think>Which colour?", call("lookup", item="paint"), "3 dollars."]
        one = sample(info={"interaction_kwargs": {"knows": {"colour": "blue"}, "persona": "You are curt."}})
        rollout = rollouts.make(said, samples=[one], **with_user(url))
        trajectory = play(rollout)
    assert trajectory.failure is None and trajectory.stop_reason is StopReason.USER_ENDED
    assert [turn.replies[-1].text for turn in trajectory.turns[:1]] == ["In blue, please."]
    assert trajectory.facts.user_notes == [{"ended_by": "stop_word", "said": "Fine. [END]"}]
    assert trajectory.facts.user_score is None
    first, second = (request["messages"] for request in received)
    assert first[0]["role"] == "system" and "You are curt." in first[0]["content"] and GOAL in first[0]["content"]
    assert "colour: blue" in first[0]["content"] and "[END]" in first[0]["content"]
    assert [(entry["role"], entry["content"]) for entry in second[1:]] == [
        ("user", "Hello! How can I help you?"),
        ("assistant", "What is 6 times 7?"),
        ("user", "Which colour?"),
        ("assistant", "In blue, please."),
        ("user", "3 dollars."),
    ], "no system message, no tools, no reasoning of the policy's"
    assert received[0]["model"] == "actor" and received[0]["seed"] != received[1]["seed"]
    rollout.check_tokens(trajectory)


def test_a_judge_of_its_own_ends_and_scores_the_conversation(rollouts, sample):
    def answer(request):
        if "Allowed replies" in request["messages"][0]["content"]:
            return completion(ChatRequest(**request))
        return "What does it cost?"

    with served(answer) as (url, received):
        judge = {"base_urls": [url], "retries": 0}
        said = ["Hello.", "The person wants to get the price of blue paint: 3 dollars."]
        trajectory = play(rollouts.make(said, **with_user(url, judge=judge)))
    assert [turn.user_score for turn in trajectory.turns] == [0.0, 1.0]
    assert trajectory.facts.user_score == 1.0
    assert trajectory.facts.user_notes == [{"ended_by": "judge"}]
    assert len(received) == 3, "judged twice, spoken once"


def test_it_leaves_after_its_turns(rollouts):
    with served(lambda request: "Go on.") as (url, _):
        trajectory = play(rollouts.make(["Hm."], **with_user(url, max_turns=2, stop_word=None)))
    assert len(trajectory.turns) == 3 and trajectory.stop_reason is StopReason.USER_ENDED
    assert trajectory.facts.user_notes == [{"ended_by": "max_turns"}]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (500, "answered 500"),
        (401, "answered 401"),
        ("", "said nothing in 3 tokens"),
        ("<think>only thoughts</think>", "said nothing"),
        ({"choices": []}, "answered without choices"),
    ],
)
def test_its_failure_is_the_episodes_and_names_it(rollouts, answer, words):
    with served(lambda request: answer) as (url, _):
        rollout = rollouts.make(["Hm."], **with_user(url))
        trajectory = play(rollout)
    assert trajectory.stop_reason is StopReason.FAILED
    assert trajectory.failure.startswith("interaction 'llm_user'") and words in trajectory.failure
    assert trajectory.turns[0].replies == [], "nobody speaks in its place"


def test_a_failure_that_passes_is_tried_again(rollouts):
    answers = iter([503, "Thanks. [END]"])
    with served(lambda request: next(answers)) as (url, received):
        trajectory = play(rollouts.make(["Hm."], **with_user(url, retries=1)))
    assert trajectory.failure is None and len(received) == 2


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({}, "needs a goal"),
        ({"goal": 3}, "interaction_kwargs.goal must be a text"),
        ({"goal": "a", "persona": "x" * 30_000}, "interaction_kwargs.persona must be a text of at most 20000"),
    ],
)
def test_a_row_that_cannot_be_played_fails_alone(rollouts, sample, kwargs, words):
    one = sample(interaction=InteractionSpec("llm_user", kwargs))
    settings = {"interaction": "llm_user", "interaction_kwargs": {"base_url": "http://127.0.0.1:1/v1"}}
    trajectory = play(rollouts.make(["Hm."], samples=[one], **settings))
    assert words in trajectory.failure


@pytest.mark.parametrize("key", ["grace_seconds", "base_url", "max_turns", "judge"])
def test_what_the_user_does_not_read_of_a_row_is_refused(rollouts, sample, key):
    one = sample(interaction=InteractionSpec("llm_user", {"goal": "a", key: "http://elsewhere"}))
    settings = {"interaction": "llm_user", "interaction_kwargs": {"base_url": "http://127.0.0.1:1/v1"}}
    with pytest.raises(PluginError, match=f"sample .*'llm_user' does not read interaction_kwargs.{key}: .*persona"):
        rollouts.make(["Hm."], samples=[one], **settings)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "needs rollout.interaction_kwargs={base_url"),
        ({"base_url": "file:///etc"}, "base_url='file:///etc' must be like"),
        ({"base_url": "http://a", "gaol": "b"}, "interaction 'llm_user': unknown option 'gaol': did you mean 'goal'"),
        ({"base_url": "http://a", "max_turns": 0}, "max_turns: Input should"),
        ({"base_url": "http://a", "stop_word": ""}, "stop_word: String should"),
        ({"base_url": "http://a", "judge": {"vote": 1}}, "judge: unknown option 'vote': did you mean 'votes'"),
    ],
)
def test_wrong_options_are_refused_before_the_run(options, words):
    with pytest.raises(ConfigError, match=words):
        Users(Config(rollout=RolloutConfig(interaction="llm_user", interaction_kwargs=options))).get("llm_user")
