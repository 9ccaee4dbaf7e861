"""examples/code_with_images: both launches resolve without a GPU or weights, and the smoke run trains for real."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from turnwise.config.check import check_config
from turnwise.config.compose import unread
from turnwise.data.loader import load_samples
from turnwise.data.task_config import compose
from turnwise.engines.devices import Gpu, VisibleGpus, rank_devices
from turnwise.engines.opener import opener_of
from turnwise.ext.judge.rubrics import rubric_of
from turnwise.ext.judge.settings import JudgeSettings
from turnwise.ext.judge.tapo import JUDGED, need_of
from turnwise.ext.ray.resource_needs import demands, sums
from turnwise.ext.servers import gpus as server_gpus
from turnwise.ext.servers.opener import GuestOpener
from turnwise.rollout.prepare import prepare
from turnwise.training.replay_buffer import replayed_per_step
from turnwise.training.staleness import oldest_allowed
from turnwise.types import Image, Sample

FOLDER = Path(__file__).parent.parent / "examples" / "code_with_images"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The model and the data of tiny.py."""
    made: tuple[Path, Path] = runpy.run_path(str(FOLDER / "tiny.py"))["make"](tmp_path_factory.mktemp("tiny"))
    return made


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return SimpleNamespace(**runpy.run_path(str(FOLDER / "launch.py")))


@pytest.mark.parametrize(("profile", "groups"), [("h200", 256), ("l40s", 64), ("ray", 256)])
def test_the_recipe_is_the_notes_and_every_key_of_it_is_read(profile: str, groups: int) -> None:
    found = compose([f"profile='{FOLDER / profile}.yaml'"], FOLDER / "codev_7b.yaml")
    config, options = found.config, found.config.scoring.options["tapo"]
    assert unread(found) == []
    assert (config.training.groups, config.training.group_size, config.training.steps) == (groups, 8, 200)
    assert (config.learner.lr, config.sampling.temperature, config.training.minibatches) == (1e-6, 1.0, 1)
    assert [options[f"{part}_weight"] for part in ("acc", "format", "tool")] == [1.0, 0.3, 0.5]
    own = ("tag", "rule", "rule_options")
    for_answers = {key: value for key, value in options["accuracy_options"].items() if key not in own}
    both = [JudgeSettings.of(one) for one in (options["judge_options"], for_answers)]
    assert both[0].key == both[1].key and both[0].max_requests  # one judge, one budget
    assert config.tracking.to == ["console", "wandb", "tensorboard"]
    assert config.training.replay_groups >= 2 * groups and 0 < replayed_per_step(config.training) < groups / 6
    check_config(config)


def test_rollout_workers_and_ranks_have_a_gpu_each_of_two_machines() -> None:
    config = compose([f"profile='{FOLDER / 'ray.yaml'}'"], FOLDER / "codev_7b.yaml").config
    assert config.cluster == "ray" and config.engine.name == "vllm_server" and not config.engine.sleep
    assert sums(demands(config, training=True))[1] == 16
    assert oldest_allowed(config) == 5, "written one step ago, and kept for four"


@pytest.mark.parametrize("profile", ["h200", "l40s"])
def test_servers_and_learner_share_eight_gpus_in_turn(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose([f"profile='{FOLDER / profile}.yaml'"], FOLDER / "codev_7b.yaml").config
    seen = VisibleGpus(tuple(Gpu("NVIDIA", 48 * 2**30) for _ in range(8)))
    monkeypatch.setattr(server_gpus, "visible_gpus", lambda: seen)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert rank_devices(config, seen) == tuple(f"cuda:{number}" for number in range(8))
    assert len(set(server_gpus.devices_of(config.servers.replicas, 1))) == 8
    opener = opener_of(config)
    assert isinstance(opener, GuestOpener)
    assert "some are shared" in (opener.check_beside_learner(config, seen) or "")


@pytest.mark.parametrize("profile", ["h200", "l40s", "ray"])
def test_a_script_says_what_the_notes_say_and_hands_on_the_rest(profile: str, tmp_path: Path) -> None:
    says = tmp_path / "says"
    says.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\nenv\n")
    says.chmod(0o755)
    bare = {"PATH": os.environ["PATH"], "HOME": "/home/me", "PYTHON": str(says)}
    given = ["--dry-run", "training.groups=4"]

    def said(**named: str) -> list[str]:
        command = ["bash", str(FOLDER / f"codev_7b_{profile}.sh"), *given]
        return subprocess.run(command, env=bare | named, capture_output=True, text=True, check=True).stdout.splitlines()

    lines = said()
    assert Path(lines[0]).resolve() == FOLDER / "launch.py" and lines[1:4] == [profile, *given]
    model = "Qwen/Qwen2.5-VL-7B-Instruct"
    expected = {
        "BASE_MODEL_PATH": model, "VLLM_MODEL_PATH": model, "DATA_REPO": "data/code_with_images",
        "DATA_CACHE": "data/code_with_images", "HF_HOME": "/home/me/.cache/huggingface",
        "LLM_AS_A_JUDGE_BASE": "http://127.0.0.1:18901/v1", "WANDB_PROJECT": "code_with_images",
    }  # fmt: skip
    assert {f"{name}={value}" for name, value in expected.items()} <= set(lines)
    own = {name: f"my/{name.lower()}" for name in expected}
    assert {f"{name}={value}" for name, value in own.items()} <= set(said(**own))
    assert {"VLLM_MODEL_PATH=/m", "DATA_CACHE=/d"} <= set(said(BASE_MODEL_PATH="/m", DATA_REPO="/d"))


@pytest.mark.long  # the recipe and what launch.py makes of the environment are tried in this process
@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ("h200", ["engine       vllm_server, 8 started here", "512   (codev_7b.yaml)"]),
        ("l40s", ["optimizer   (profile l40s.yaml)", "smaller above 1,048,576 pixels"]),
        (
            "ray",
            ["cluster      ray at auto: 8 sampler(s) of 1 CPUs and 1 GPUs", "not here cluster: ray.address: cannot"],
        ),
    ],
)
def test_a_script_resolves_with_the_environment_and_without_a_gpu(
    profile: str, words: list[str], small: tuple[Path, Path], tmp_path: Path
) -> None:
    model, data = map(str, small)
    named = {"BASE_MODEL_PATH": model, "VLLM_MODEL_PATH": model, "DATA_REPO": data, "WANDB_PROJECT": "mine"}
    environment = {
        **os.environ,
        **named,
        "LLM_AS_A_JUDGE_BASE": "http://a:1/v1,http://b:1/v1",
        "PYTHON": sys.executable,
    }
    command = ["bash", str(FOLDER / f"codev_7b_{profile}.sh"), "--dry-run", "--save-path", "there", "training.groups=4"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for said in (
        "runs_dir                        there   (command line)", f"{model}   (environment BASE_MODEL_PATH)",
        f"['{data}/train.jsonl']   (environment DATA_REPO)", "mine   (environment WANDB_PROJECT)",
        "LLM_AS_A_JUDGE_BASE=http://a:1/v1,http://b:1/v1: the judge's endpoints", "images       of users and tools, at most 9 an episode",
        "ok       trackers: console, wandb, tensorboard", *words,
        "ok       tool schemas: shown to the model and read back: python", "the config resolves; nothing was written",
    ):  # fmt: skip
        assert said in done.stdout, said
    assert list(tmp_path.iterdir()) == []


def test_what_a_dry_run_needs_is_one_line(
    small: tuple[Path, Path], launch: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA_REPO", str(small[1]))
    monkeypatch.delenv("VLLM_MODEL_PATH", raising=False)
    monkeypatch.setenv("BASE_MODEL_PATH", "Qwen/Qwen2.5-VL-7B-Instruct")
    assert launch.main(["h200", "--dry-run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "Qwen/Qwen2.5-VL-7B-Instruct (BASE_MODEL_PATH) is not a folder here" in line and "tiny.py" in line
    monkeypatch.setenv("BASE_MODEL_PATH", str(small[0]))
    assert launch.main(["h200", "--dry-run", "training.group=4"]) == 2
    assert "training.groups" in capsys.readouterr().err


def test_rows_are_read_from_the_tar_with_the_system_prompt_once(small: tuple[Path, Path]) -> None:
    kind = runpy.run_path(str(FOLDER / "rows.py"))["WithSystemPrompt"]
    files = [str(small[1] / f"{name}.jsonl") for name in ("train", "test")]
    plain = load_samples(files, prompt_key="prompt")
    assert [sample.ground_truth for sample in plain] == ["red", "1", "blue", "2", "green", "3", "black", "4"]
    assert all(isinstance(sample.images[0], Image) and "images.tar!/" in sample.images[0].source for sample in plain)
    rows = kind(files, SimpleNamespace(prompt_key="prompt"))
    for number in range(len(rows)):
        told = number != 5  # which has no environment, and so no tool to be told of
        assert [one["role"] for one in rows[number]["prompt"]] == ["system", "user"][not told :]
        assert (rows[number]["prompt"][0]["content"] == (FOLDER / "system_prompt.txt").read_text().strip()) is told
    assert len(rows) == 8


def test_rows_with_an_environment_may_look_and_others_have_one_turn(
    small: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA_REPO", str(small[1]))
    monkeypatch.setenv("BASE_MODEL_PATH", str(small[0]))
    monkeypatch.delenv("VLLM_MODEL_PATH", raising=False)
    config = compose([f"profile='{FOLDER / 'smoke.yaml'}'"], FOLDER / "codev_7b.yaml").config
    plan = prepare(config, "train").plan
    routes = {(route.data_source, route.agent, route.tools): count for route, count in plan.routes.items()}
    looking = ("tool_calling", ("python",))
    assert routes == {("vstar", *looking): 3, ("IconQA", *looking): 2, ("thinklite", "single_turn", ()): 1}
    needs, rubrics = (config.scoring.options["tapo"][name] for name in ("need", "rubric"))
    assert needs.keys() == rubrics.keys() and {need_of(source, needs) for source in ("IconQA", "GeoQA")} <= {*JUDGED}
    for source, name in rubrics.items():  # what null would take
        assert rubric_of(Sample("s", (), source), None).name == name, source


@pytest.mark.parametrize(
    "given",
    [
        pytest.param([], id="here"),
        pytest.param(["cluster=ray", "ray.samplers=2", "ray.sandboxes=1"], id="ray", marks=pytest.mark.long),
    ],
)
def test_the_smoke_run_trains_with_sandbox_judge_images_and_replay(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("DATA_REPO", "BASE_MODEL_PATH", "VLLM_MODEL_PATH", "LLM_AS_A_JUDGE_BASE"):
        monkeypatch.setenv(name, "unset")  # smoke.py sets them: they go back with the test
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", ["smoke.py", "--out", str(tmp_path), *given])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / "smoke.py"), run_name="__main__")
    said = capfd.readouterr()
    assert ended.value.code == 0, said.err
    run = tmp_path / "runs" / "codev_7b_smoke"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [one for one in steps if "actor/grad_norm" in one]
    assert len(trained) == 2 and all(one["scoring/failures"] == 0 for one in trained)
    assert trained[0]["training/rollout_probs_diff_mean"] < 1e-4  # with the tools' images; later ones have older tokens
    assert [one["replay/groups"] for one in trained] == [0, 1], "the second step has one of the first's again"
    assert sum(one["judge/requests"] for one in trained) > 0 and trained[-1]["judge/requests_left"] < 2_000_000
    found = re.search(r"2 steps, 32 episodes: (\d+) programs ran and showed the model (\d+) images", said.out)
    assert found is not None and int(found[1]) >= int(found[2]) > 0
    assert sorted((run / "eval").glob("step_*.json")) and (tmp_path / "verdicts" / "verdicts.sqlite").exists()
    assert (tmp_path / "board.html").stat().st_size > 100_000
