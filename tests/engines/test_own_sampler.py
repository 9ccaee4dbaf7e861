"""A sampler of the user's: the example of docs/engines.md evaluates and trains as it stands; what is none is refused."""

import contextlib
import re
from pathlib import Path

import pytest

from turnwise.commands.cli import main
from turnwise.storage.trajectories.files import read_trajectories

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
NAME = "generate_sampler.py:GenerateSampler"
SMALL = ("task=arithmetic", "rollout.tools=[calculate]", "rollout.interaction=null", "rollout.max_assistant_turns=2",
         "sampling.max_tokens=16", "eval.samples=1", "engine.threads=1", "board.live=false")  # fmt: skip
TRAINING = ("training.steps=1", "training.groups=2", "training.group_size=2")


@pytest.fixture
def code() -> str:
    (found,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(found)


def test_the_example_evaluates_and_trains(
    code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len([line for line in code.splitlines() if line]) <= 45, "an example is read at a glance"
    (tmp_path / "generate_sampler.py").write_text(code)
    with contextlib.chdir(tmp_path):
        for run in ("a", "again"):
            assert main(["eval", *SMALL, f"engine={NAME}", f"run={run}", "sampling.stop=['>']"]) == 0
        assert main(["train", *SMALL, *TRAINING, f"engine={NAME}", "run=b"]) == 0
        first, again = (read_trajectories(Path("runs", run, "eval/step_000000.parquet")) for run in ("a", "again"))
        trained = read_trajectories(Path("runs/b/eval/step_000001.parquet"))
        said = Path("runs/b/log.txt").read_text()
        capsys.readouterr()
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of another user"))
        assert main(["train", "run=b", "resume=auto", "training.steps=2"]) == 2
    assert f"engine.name={NAME}" in capsys.readouterr().err.split("asks to import, contact or open this")[1], (
        "a run folder imports nothing"
    )
    assert f"engine {NAME}: log-probs as the learner computes them, takes all weights, reads text only" in said
    assert "is not proven" in said and re.search(r"sampler and learner log-probs differ by \S+ on average", said)
    written = [[list(ledger.token_ids) for one in run for ledger in one.segments] for run in (first, again)]
    assert written[0] == written[1], "the noise key alone decides"
    assert any(turn.message.text.endswith(">") for one in first for turn in one.turns)
    assert {turn.policy_version for one in trained for turn in one.turns} == {1}


@pytest.mark.parametrize(
    ("change", "command", "words"),
    [
        ({"wake = close": "close"}, "eval", "is not a Sampler: it lacks `async def wake`"),
        ({"async def publish": "async def publishes"}, "eval", "is not a Sampler: it lacks `async def publish`"),
        ({"capabilities = ": "abilities = "}, "eval", "must set context_length and capabilities"),
        ({"config, source, tokenizer": "config"}, "eval", "is called with (config, source, tokenizer)"),
        ({"float32)": "float33)"}, "eval", "float33"),
        ({"class Generate": "class Generated"}, "eval", "did you mean 'GeneratedSampler'?"),
        ({"frozenset({FullWeights})": "frozenset()"}, "train", "takes: nothing"),
        ({"Logprobs.SCALED": "Logprobs.NONE"}, "train", "training needs log-probs"),
    ],
)
def test_what_is_no_sampler_is_refused_in_one_line(
    code: str, tmp_path: Path, change: dict[str, str], command: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for old, new in change.items():
        assert code.count(old) == 1
        code = code.replace(old, new)
    (tmp_path / "generate_sampler.py").write_text(code)
    with contextlib.chdir(tmp_path):
        assert main([command, *SMALL, *(TRAINING if command == "train" else ()), f"engine={NAME}"]) == 2
    assert words in capsys.readouterr().err.strip().splitlines()[-1]


REPLY = "Completion.of(ids.tolist(), logprobs.tolist(), finish, version=self.version)"


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ("ids.tolist()", "generate gives a Completion with a FinishReason, not list"),
        (
            "Completion(ids.tolist(), logprobs.tolist(), finish, (VersionRun(0, len(ids)),))",
            "token_ids is not an array",
        ),
        ("Completion(ids.float().numpy(), logprobs.numpy(), finish, (VersionRun(0, len(ids)),))", "whole numbers"),
        ("Completion.of(ids.tolist(), [0.0], finish, version=0)", "generate failed: ValueError"),
        ("Completion.of((ids + 5000).tolist(), logprobs.tolist(), finish, version=0)", "the vocabulary has 768"),
        ("Completion.of((-ids - 1).tolist(), logprobs.tolist(), finish, version=0)", "token ids from -"),
        ("Completion.of(ids.tolist(), (logprobs * torch.nan).tolist(), finish, version=0)", "log-probs that are nan"),
        ("Completion.of(ids.tolist(), (1 - logprobs).tolist(), finish, version=0)", "or above 0"),
        ("Completion.of(ids.tolist() * 17, logprobs.tolist() * 17, finish, version=0)", "tokens where 16 were asked"),
        ("Completion.of(ids.tolist(), logprobs.tolist(), finish, version=-3)", "under a version from 0 on"),
        (
            "Completion(ids.numpy(), logprobs.numpy(), finish, (VersionRun(0, -1), VersionRun(1, len(ids) + 1)))",
            "versions are runs of tokens",
        ),
    ],
)
def test_what_is_no_completion_stops_the_run_and_is_not_recorded(
    code: str, tmp_path: Path, reply: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code.count(REPLY) == 1
    code = code.replace(REPLY, reply).replace("import Completion, FinishReason", "import *")
    (tmp_path / "generate_sampler.py").write_text(code)
    with contextlib.chdir(tmp_path):
        assert main(["eval", *SMALL, f"engine={NAME}", "run=a"]) == 2
        assert not list(Path("runs/a").rglob("*.parquet"))
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith(f"turnwise eval: engine {NAME!r}: ") and words in line
