"""The reward server over real HTTP."""

import asyncio
import contextlib
import importlib
import json
from pathlib import Path

import httpx
import pytest

from turnwise.choices import ScoringRun
from turnwise.config import ScoringConfig
from turnwise.errors import ConfigError, PluginError
from turnwise.scoring.scorer import ScorerSpec, evaluate
from turnwise.scoring.service import make_runner
from turnwise.storage.trajectory_rows import to_row
from turnwise.types import FinishReason, Message, Role, Sample, StopReason, Trajectory, Turn

uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")
reward_server = importlib.import_module("turnwise.scoring.server")

TOKEN = "a-token-for-tests"


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
            return [await client.post("/compute_reward", content=json.dumps(one)) for one in bodies]

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


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{", b"\xff", json.dumps(body(id=3)).encode(), json.dumps(body(trajectory={})).encode(),
     json.dumps(body(trajectory=to_row(episode()) | {"turns": 3})).encode(), b"[" * 100_000],
)  # fmt: skip
def test_nonsense_is_refused(content):
    async def main():
        async with serving() as client:
            return await client.post("/compute_reward", content=content), await client.get("/health")

    answer, health = asyncio.run(main())
    assert answer.status_code == 422
    assert health.json() == {"status": "ok"}


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
        async with serving(TOKEN, pool, scorers=(f"{path}:score",)) as client:
            runner = make_runner(ScoringConfig(run=ScoringRun.http, url=str(client.base_url), token_env="T"))
            try:
                await runner.start()
                scorer = runner.scorer(ScorerSpec(f"{path}:score", {"scale": 2}))
                return await evaluate(scorer, episode())
            finally:
                await runner.stop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("T", TOKEN)
        score = asyncio.run(main())
    assert (score.reward, score.parts) == (6.0, {"half": 0.5})


def test_strangers_cannot_use_it():
    with pytest.raises(ConfigError, match="a reward server on '0.0.0.0' scores .*give it a token"):
        asyncio.run(reward_server.serve("0.0.0.0", 0, None))


def test_a_scorer_that_is_not_there_is_found_when_the_server_is_made():
    with pytest.raises(PluginError):
        reward_server.make_app(
            make_runner(ScoringConfig()), None, reward_server.RewardServerSettings(scorers=("no_such_module:f",))
        )
