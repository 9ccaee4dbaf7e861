"""`turnwise config` as a person calls it: all keys, a section, one key, and what is no key."""

import json
import subprocess
import sys

import pytest

from turnwise.commands.cli import main
from turnwise.config import Config
from turnwise.config.sections import flat


def test_one_key_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "training.max_lag"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for part in (
        "training.max_lag=0", "Raise it to 1 when training waits for slow tools", "default 0",
        "takes a whole number, at least 0", "read always", "read by", "rollout/collector.py: Many groups at once",
    ):  # fmt: skip
        assert part in said
    assert main(["config", "training.groups"]) == 0
    assert "default 12; 24 with task=arithmetic" in " ".join(capsys.readouterr().out.split())
    assert main(["config", "engine.base_url=x"]) == 0, "as it was typed for another command"
    assert "read only with engine.name=openai" in " ".join(capsys.readouterr().out.split())


def test_lists_have_one_line_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    named = [line.split()[0] for line in lines if line.startswith("  ")]
    assert named == list(flat(Config()))
    assert main(["config", "learner"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "learner: How the learner changes the weights: learning rates, schedule and optimizer."
    assert [line.split()[0] for line in lines if line.startswith("  ")] == [
        k for k in named if k.startswith("learner.")
    ]


def test_json_has_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "algorithm.loss", "--json"]) == 0
    page = json.loads(capsys.readouterr().out)["algorithm.loss"]
    assert page["default"] == "ppo_clip" and set(page["choices"]) == {"ppo_clip", "gspo", "cispo", "reinforce"}
    assert page["read_by"] and page["doc"].startswith("How an advantage becomes a loss.")


def test_what_is_no_key_is_one_line_and_code_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "sampling.temprature"]) == 2
    said = capsys.readouterr().err
    assert "did you mean 'sampling.temperature'?" in said and said.count("\n") == 1


def test_a_key_of_verls_is_answered_with_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "trainer.save_freq"]) == 0
    assert "is not a Turnwise key; its equivalent: training.save_every" in capsys.readouterr().out
    assert main(["config", "trainer.save_freq", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"trainer.save_freq": {"equivalent": "training.save_every"}}


def test_it_imports_nothing_heavy() -> None:
    code = (
        "import sys; from turnwise.commands.cli import main; main(['config', 'training.max_lag'])\n"
        "heavy = {'torch', 'transformers', 'hydra', 'rich', 'pyarrow', 'pandas'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
