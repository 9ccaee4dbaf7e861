"""The reward server over real HTTP."""

import asyncio
import contextlib
import dataclasses
import importlib
import inspect
import json
import os
from pathlib import Path

import httpx
import pytest
from PIL import Image

from turnwise.config import ScoringConfig
from turnwise.config.choices import ScoringRun
from turnwise.errors import ConfigError, PluginError
from turnwise.ext.judge.settings import JudgeSettings
from turnwise.scoring.client_options import declared_options
from turnwise.scoring.runners import worker
from turnwise.scoring.scorer import KEPT_SCORERS, ScorerSpec, builtin_scorers, evaluate
from turnwise.scoring.service import make_runner
from turnwise.storage.trajectories.rows import to_row
from turnwise.system.plugins import load
from turnwise.types import FinishReason, Message, Role, Sample, StopReason, Trajectory, Turn

uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")
reward_server = importlib.import_module("turnwise.scoring.runners.server")

TOKEN = "a-token-for-tests"
JSON = {"Content-Type": "application/json"}
VIEWS = ("evidence_only", "full_trace")


def episode(truth: str = "18") -> Trajectory:
    prompt = (Message(Role.USER, "6*3?"),)
    turn = Turn(0, Message(Role.ASSISTANT, "#### 18"), FinishReason.STOP, 0, 3, 2)
    sample = Sample("s", prompt, "arithmetic", truth)
    return Trajectory(sample, 1, 0, [*prompt, turn.message], [turn], [], StopReason.ANSWERED, 1.0)


def body(**changes):
    return {"id": "r1", "session": "s/0/1", "scorer": "gsm8k_strict", "trajectory": to_row(episode()), **changes}


@contextlib.asynccontextmanager
async def serving(token=None, runner=None, **settings):
    """A server on a real port, and a client with its token."""
    app = reward_server.make_app(
        runner or make_runner(ScoringConfig()), token, reward_server.RewardServerSettings(**settings)
    )
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
    running = asyncio.ensure_future(server.serve())
    while not server.started:
        assert not running.done()
        await asyncio.sleep(0.005)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as client:
            yield client
    finally:
        server.should_exit = True
        await running


def ask(*bodies, **settings):
    async def main():
        async with serving(**settings) as client:
            return [await client.post("/compute_reward", content=json.dumps(one), headers=JSON) for one in bodies]

    return asyncio.run(main())


def test_a_trajectory_gets_its_score_with_the_id_of_the_request():
    right, wrong = ask(body(), body(id="r2", trajectory=to_row(episode("17"))))
    assert right.json() == {"id": "r1", "session": "s/0/1", "reward": 1.0, "parts": {}, "turns": {}}
    assert (wrong.json()["id"], wrong.json()["reward"]) == ("r2", 0.0)


def test_a_scorers_exception_is_an_answer():
    (answer,) = ask(body(trajectory=to_row(episode()) | {"ground_truth": "18"}))  # JSON for a number
    told = answer.json()
    assert answer.status_code == 200 and told["id"] == "r1" and "reward" not in told
    assert (told["error"]["name"], told["error"]["module"]) == ("DataError", "turnwise.errors")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"scorer": "os:system"}, "does not serve it"),
        ({"scorer": "gsm8k_stric"}, "did you mean 'gsm8k_strict'"),
        ({"options": {"none": 1}}, "unknown option 'none'"),
    ],
)
def test_only_what_is_served_can_be_asked_for(changes, text):
    (answer,) = ask(body(**changes))
    assert text in answer.json()["error"]["text"]
    assert answer.json()["error"]["name"] == "ConfigError"


NONSENSE = (
    b"", b"[]", b"{", b"\xff", json.dumps(body(id=3)).encode(), json.dumps(body(trajectory={})).encode(),
    json.dumps(body(trajectory=to_row(episode()) | {"turns": 3})).encode(), b"[" * 100_000,
)  # fmt: skip


def test_nonsense_is_refused():
    async def main():
        async with serving() as client:
            for content in NONSENSE:
                answer = await client.post("/compute_reward", content=content, headers=JSON)
                assert answer.status_code == 422, content[:80]
            return await client.get("/health")

    assert asyncio.run(main()).json() == {"status": "ok"}


def test_the_token_is_needed_where_there_is_one():
    async def main():
        async with serving(TOKEN) as client:
            good = await client.post("/compute_reward", json=body())
            for wrong in ("", "Bearer", "Bearer x", f"Basic {TOKEN}", f"Bearer {TOKEN}x"):
                refused = await client.post("/compute_reward", json=body(), headers={"Authorization": wrong})
                assert refused.status_code == 401, wrong
            return good

    assert asyncio.run(main()).status_code == 200


def test_long_requests_and_too_many_of_them_are_turned_away(tmp_path: Path):
    path = tmp_path / "slow.py"
    path.write_text("import asyncio\nasync def slow(trajectory):\n    await asyncio.sleep(0.3)\n    return 1.0\n")

    async def main():
        async with serving(scorers=(f"{path}:slow",), calls=2, body=20_000) as client:
            long = await client.post("/compute_reward", json=body(session="x" * 30_000))
            asked = (client.post("/compute_reward", json=body(scorer=f"{path}:slow")) for _ in range(4))
            return long.status_code, await asyncio.gather(*asked)

    long, answers = asyncio.run(main())
    assert long == 413
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429]
    assert {answer.headers.get("retry-after") for answer in answers} == {None, "1"}


def test_its_scorers_may_run_in_a_pool_and_its_client_sees_no_difference(tmp_path: Path):
    path = tmp_path / "own.py"
    path.write_text("def score(trajectory, *, scale=1):\n    return {'score': scale * 3, 'half': 0.5}\n")

    async def main():
        pool = make_runner(ScoringConfig(run=ScoringRun.pool, workers=1))
        name = f"{path}:score"
        async with serving(TOKEN, pool, scorers=(name,), client_options={name: ["scale"]}) as client:
            runner = make_runner(ScoringConfig(run=ScoringRun.http, url=str(client.base_url)))
            try:
                await runner.start()
                scorer = runner.scorer(ScorerSpec(name, {"scale": 2}))
                return await evaluate(scorer, episode())
            finally:
                await runner.stop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TURNWISE_REWARD_TOKEN", TOKEN)
        score = asyncio.run(main())
    assert (score.reward, score.parts) == (6.0, {"half": 0.5})


def test_only_loopback_without_a_token():
    with pytest.raises(ConfigError, match="a reward server on '0.0.0.0' scores .*give it a token"):
        asyncio.run(reward_server.serve("0.0.0.0", 0, None))


def test_a_scorer_that_is_not_there_is_found_when_the_server_is_made():
    with pytest.raises(PluginError):
        reward_server.make_app(
            make_runner(ScoringConfig()), None, reward_server.RewardServerSettings(scorers=("no_such_module:f",))
        )


# --- what a client may not say ------------------------------------------------------------------------------------

NEVER = {
    "tapo": ("accuracy", "accuracy_options", "judge", "judge_options", "rubric"),
    "judge": ("rule", "rule_options", "base_urls", "model", "api_key_env", "cache", "extra_body", "votes", "retries",
              "timeout", "concurrency", "max_tokens", "max_pixels"),
    "code_tests": ("level", "min_level", "url", "preload", "seconds", "memory_mb", "file"),
    "math": ("seconds",),
    "swe_tests": ("seconds", "memory_mb", "scratch_mb", "min_level", "url"),
}  # fmt: skip
"""Plug-ins, addresses, environment variables, files, sandbox levels, and what costs the server's time."""


def test_what_names_code_addresses_files_or_levels_is_refused_by_name(tmp_path):
    """Whatever the value: a plug-in that would leave a mark leaves none."""
    mark = tmp_path / "mark"
    (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nPopen = print\n")
    values = [f"{tmp_path}/evil.py:Popen", "subprocess:Popen", {"judge": f"{tmp_path}/evil.py:Popen"}, None, ["x"]]
    asked = [(scorer, {option: value}) for scorer, options in NEVER.items() for option in options for value in values]
    answers = ask(*(body(scorer=scorer, options=options) for scorer, options in asked))
    for (scorer, options), answer in zip(asked, answers, strict=True):
        told, (option,) = answer.json()["error"], options
        assert told["name"] == "ConfigError" and "cannot be set by a client" in told["text"], (scorer, options, told)
        assert repr(option) in told["text"], (scorer, options, told)
    assert not mark.exists()


def test_every_option_of_every_scorer_is_either_declared_or_refused():
    for name, source in builtin_scorers().items():
        parameters = set(list(inspect.signature(load(source, "scorer")).parameters)[1:])
        assert declared_options(name) <= parameters
        assert parameters - declared_options(name) == parameters & set(NEVER.get(name, ())) | {
            one.name for one in dataclasses.fields(JudgeSettings) if name == "judge"
        }


def test_what_is_declared_still_comes_from_clients():
    asked = body(scorer="gsm8k", options={"correct": 2.0, "wrong": -1.0})
    wrong = asked | {"trajectory": to_row(episode("17"))}
    assert [answer.json()["reward"] for answer in ask(asked, wrong)] == [2.0, -1.0]


def test_the_operators_options_hold_and_clients_add_to_them(tmp_path: Path):
    path = tmp_path / "own.py"
    path.write_text(
        "from turnwise.scoring.client_options import client_options\n@client_options('scale')\n"
        "def score(trajectory, *, scale=1, where='nowhere'):\n    return {'score': scale, 'there': where == 'here'}\n"
        "def undeclared(trajectory, *, scale=1):\n    return scale\n"
    )
    name, other = f"{path}:score", f"{path}:undeclared"
    settings = {"scorers": (name, other), "options": {name: {"where": "here", "scale": 3}}}
    bodies = (body(scorer=name), body(scorer=name, options={"scale": 5}), body(scorer=name, options={"where": "x"}))
    default, scaled, refused = (answer.json() for answer in ask(*bodies, **settings))
    assert (default["reward"], default["parts"]) == (3.0, {"there": 1.0})
    assert (scaled["reward"], scaled["parts"]) == (5.0, {"there": 1.0})
    assert "'where' cannot be set by a client" in refused["error"]["text"]
    (none,) = ask(body(scorer=other, options={"scale": 5}), **settings)
    assert "it takes none" in none.json()["error"]["text"]
    (allowed,) = ask(body(scorer=other, options={"scale": 5}), **settings, client_options={other: ["scale"]})
    assert allowed.json()["reward"] == 5.0


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"client_options": {"judge": ["base_urls"]}}, "'base_urls' of judge never comes from a client"),
        ({"client_options": {"gsm": ["wrong"]}}, "did you mean 'gsm8k'"),
        ({"options": {"gsm8k": {"rwong": 1}}}, "did you mean 'wrong'"),
        ({"options": {"mine:f": {}}}, "does not serve it"),
    ],
)
def test_an_operators_mistake_is_found_when_the_server_is_made(settings, text):
    with pytest.raises(ConfigError, match=text):
        reward_server.make_app(make_runner(ScoringConfig()), None, reward_server.RewardServerSettings(**settings))


def test_a_client_learns_at_its_start_what_the_server_does_not_take():
    async def starting(options, scorer="judge", **more):
        async with serving(**more) as client:
            runner = make_runner(ScoringConfig(run=ScoringRun.http, url=str(client.base_url)))
            runner.scorer(ScorerSpec(scorer, options))
            try:
                await runner.start()
                return runner.scorer(ScorerSpec(scorer, options)).__qualname__
            finally:
                await runner.stop()

    assert asyncio.run(starting({"tag": "answer"})) == "judge"
    with pytest.raises(
        ConfigError, match="does not take the option 'base_urls' of scorer judge from clients .*leave it"
    ):
        asyncio.run(starting({"base_urls": ["http://127.0.0.1:1/v1"]}))
    with pytest.raises(ConfigError, match="does not serve it: unknown scorer 'judge'"):
        asyncio.run(starting({}, scorers=("gsm8k",)))
    with pytest.raises(ConfigError, match="the token is wrong or missing"):
        asyncio.run(starting({}, token=TOKEN))


def picture(path: Path) -> Path:
    Image.new("RGB", (8, 8), "red").save(path, "PNG")
    return path


def with_images(**sources):
    """A trajectory with images beside the prompt, in the prompt, and in a tool's reply."""
    part = {"kind": "image", "value": sources["inside"]}
    row = to_row(episode())
    row["images"] = [sources["beside"]]
    row["prompt"] = [row["prompt"][0] | {"text": None, "parts": [part]}]
    reply = row["prompt"][0] | {"role": "tool", "parts": [{"kind": "image", "value": sources["reply"]}]}
    row["turns"] = [row["turns"][0] | {"replies": [reply]}]
    return row


def test_a_path_in_a_trajectory_opens_no_file_of_the_server(tmp_path: Path):
    path = tmp_path / "own.py"
    path.write_text(
        "from turnwise.types import Image\n"
        "def readable(trajectory):\n"
        "    sample = trajectory.sample\n"
        "    found = [*sample.images, *sample.prompt[0].content, *trajectory.turns[0].replies[0].content]\n"
        "    sources = [one.source for one in found]\n"
        "    count = 0\n"
        "    for source in sources:\n"
        "        try:\n            open(source).close()\n            count += 1\n"
        "        except NotADirectoryError:\n            assert 'does not open' in source\n"
        "    assert sources[0].endswith('secret.png'), sources\n"
        "    return count\n"
    )
    secret, shared = picture(tmp_path / "secret.png"), tmp_path / "shared"
    shared.mkdir()
    picture(shared / "mine.png")
    (shared / "secret.png").symlink_to(secret)
    name = f"{path}:readable"
    outside = with_images(beside=str(secret), inside="/etc/passwd", reply="../secret.png")
    inside = with_images(beside=str(shared / "secret.png"), inside="mine.png", reply=str(shared / "mine.png"))
    bodies = [body(scorer=name, trajectory=row) for row in (outside, inside)]
    assert [answer.json().get("reward") for answer in ask(*bodies, scorers=(name,))] == [0, 0]
    assert [answer.json().get("reward") for answer in ask(*bodies, scorers=(name,), images=shared)] == [0, 2]


def test_a_judge_is_shown_no_file_of_the_server_and_says_that_it_was_not(tmp_path: Path):
    secret = picture(tmp_path / "secret.png")
    row = with_images(beside=str(secret), inside=str(secret), reply=str(secret)) | {"ground_truth": '"17"'}
    settings = {"options": {"judge": {"base_urls": ["http://127.0.0.1:1/v1"], "retries": 0}}}
    (answer,) = ask(body(scorer="judge", trajectory=row, options={"show_images": True}), **settings)
    told = answer.json()["error"]
    assert told["name"] == "ScoringFailed" and "does not open/secret.png cannot be read" in told["text"]


def test_a_path_in_the_facts_of_a_call_opens_no_file_of_the_server(tmp_path: Path):
    """A pipe would be waited for, and a picture would be sent to the judge."""
    row, secret, pipe = to_row(episode()), picture(tmp_path / "secret.png"), tmp_path / "pipe"
    os.mkfifo(pipe)
    call = {"id": "c", "name": "python", "arguments": "{}", "problem": None}
    reply = row["prompt"][0] | {"role": "tool", "tool_call_id": "c", "text": "done, and more than a few words"}
    rows = []
    for path in (secret, pipe):
        info = json.dumps({"images": [{"data": str(path), "source": None, "size": [8, 6]}]})
        record = {"call": call, "status": "ok", "seconds": 0.0, "truncated": False, "score": None, "info": info}
        spoken = row["turns"][0]["message"] | {"tool_calls": [call]}
        rows.append(row | {"turns": [row["turns"][0] | {"message": spoken, "calls": [record], "replies": [reply]}]})
    settings = {"options": {"tapo": {"judge_options": {"base_urls": ["http://127.0.0.1:1/v1"], "retries": 0}}}}
    bodies = [body(scorer="tapo", trajectory=one, options={"view": view}) for one in rows for view in VIEWS]
    errors = [answer.json()["error"] for answer in ask(*bodies, **settings)]
    assert len(errors) == 2 * len(VIEWS) >= 4
    assert all(error["name"] == "ScoringFailed" and "no file is opened" in error["text"] for error in errors)


def test_long_options_are_refused_because_their_scorers_are_kept():
    long = body(scorer="gsm8k", options={"wrong": "x" * reward_server.LONGEST_OPTIONS})
    answer, served = ask(long, body())
    assert answer.status_code == 422 and "options" in answer.text and served.json()["reward"] == 1.0


def test_deep_options_are_refused_and_not_an_error_of_the_server():
    deep = "[" * 900 + "]" * 900
    text = json.dumps(body(scorer="gsm8k", options={"wrong": "DEEP"})).replace('"DEEP"', deep)

    async def main():
        async with serving() as client:
            return await client.post("/compute_reward", content=text, headers=JSON)

    assert asyncio.run(main()).status_code in (200, 422)  # as deep as this interpreter can write it, or not


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_web_page_cannot_ask_for_scores(kind):
    async def main():
        async with serving() as client:
            content = json.dumps(body())
            plain = await client.post("/compute_reward", content=content, headers={"Content-Type": kind})
            rebound = await client.post("/compute_reward", content=content, headers={**JSON, "Host": "evil.example"})
            return plain.status_code, rebound.status_code

    assert asyncio.run(main()) == (415, 400)


@pytest.mark.parametrize("run", [ScoringRun.inline, ScoringRun.pool])
def test_a_call_ends_with_its_client(run, tmp_path: Path):
    path = tmp_path / "slow.py"
    path.write_text("import asyncio\nasync def slow(trajectory):\n    await asyncio.sleep(600)\n")
    name = f"{path}:slow"

    async def main():
        runner = make_runner(ScoringConfig(run=run, workers=1, timeout=600))
        async with serving(None, runner, scorers=(name, "gsm8k_strict"), calls=1) as client:
            for _ in range(2):
                with pytest.raises(httpx.ReadTimeout):
                    await client.post("/compute_reward", json=body(scorer=name), timeout=1.0)
                for _ in range(3000):
                    answer = await client.post("/compute_reward", json=body())
                    if answer.status_code != 429:
                        break
                    await asyncio.sleep(0.02)
            return answer

    assert asyncio.run(main()).json()["reward"] == 1.0


def test_ever_new_options_do_not_fill_the_memory():
    async def main():
        runner = make_runner(ScoringConfig(run=ScoringRun.pool, workers=1))
        async with serving(None, runner) as client:
            for number in range(KEPT_SCORERS + 40):
                asked = body(scorer="gsm8k", options={"correct": float(number)})
                assert (await client.post("/compute_reward", json=asked)).json()["reward"] == number
            first = await client.post("/compute_reward", json=body(scorer="gsm8k", options={"correct": 0.0}))
            return len(runner._specs), first.json()["reward"]

    assert asyncio.run(main()) == (KEPT_SCORERS, 0.0)


def test_a_worker_keeps_the_scorers_that_were_used_last():
    for number in range(KEPT_SCORERS + 40):
        worker._scorer(json.dumps({"name": "gsm8k", "options": {"correct": float(number)}}))
    assert worker._scorer.cache_info().currsize == KEPT_SCORERS
