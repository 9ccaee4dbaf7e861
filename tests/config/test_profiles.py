"""Launch profiles: values beneath the user's, without a key that nobody reads, and what each needs said in one line."""

from pathlib import Path

import pytest

from turnwise.config.compose import FILES, unread
from turnwise.data.task_config import compose
from turnwise.engines.devices import Gpu, VisibleGpus, rank_devices
from turnwise.errors import ConfigError
from turnwise.ext.servers import gpus as server_gpus
from turnwise.reports.preflight import preflight

NAMES = sorted(path.stem for path in (FILES / "profiles").glob("*.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_every_profile_is_a_config_all_of_which_is_read(name: str) -> None:
    found = compose([f"profile={name}"])
    assert unread(found) == [] and found.config.profile == name
    assert f"profile {name}" in found.origins.values()
    text = (FILES / "profiles" / f"{name}.yaml").read_text()
    assert text.startswith("# ") and "/" not in text.splitlines()[0]


def test_the_laptops_passes_every_check_here_and_a_gpus_asks_for_one() -> None:
    report = preflight(compose(["profile=laptop", "eval.samples=4"]))
    assert report.passed, report.errors
    assert "profile      laptop" in report.plan
    lacking = preflight(compose(["profile=one_gpu", "eval.samples=4"]))
    assert [finding.text for finding in lacking.errors] == [
        "engine=cuda: PyTorch sees no GPU on this machine; engine=torch writes on the CPU"
    ]


def test_of_eight_gpus_the_learner_has_the_first_four_and_servers_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose(["profile=eight_gpus"]).config
    seen = VisibleGpus(tuple(Gpu("NVIDIA H200", 2**37) for _ in range(8)))
    monkeypatch.setattr(server_gpus, "visible_gpus", lambda: seen)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert rank_devices(config, seen) == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    assert server_gpus.devices_of(config.servers.replicas, 1) == ["7", "6", "5", "4"]


def test_a_profile_stands_over_the_task_and_beneath_the_user(tmp_path: Path) -> None:
    assert compose().config.training.groups == 24  # the task's
    assert compose(["profile=laptop"]).config.training.groups == 8
    assert compose(["profile=laptop", "training.groups=3"]).config.training.groups == 3
    (tmp_path / "mine.yaml").write_text("profile: laptop\ntraining: {groups: 5}\n")
    found = compose([], tmp_path / "mine.yaml")
    assert (found.config.training.groups, found.config.training.group_size) == (5, 4)
    assert found.origins["training.group_size"] == "profile laptop"
    (tmp_path / "ours.yaml").write_text("learner: {token_budget: 2048}\n")
    assert compose([f"profile={tmp_path}/ours.yaml"]).config.learner.token_budget == 2048


def test_what_is_no_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown profile 'lapto': did you mean 'laptop'.*FILE.yaml"):
        compose(["profile=lapto"])
    with pytest.raises(ConfigError, match="no config file nowhere.yaml"):
        compose(["profile=nowhere.yaml"])
    (tmp_path / "what.yaml").write_text("task: gsm8k\nrun: x\n")
    with pytest.raises(ConfigError, match="a profile says how to run, not what: take task, run out of it"):
        compose([f"profile={tmp_path}/what.yaml"])
    (tmp_path / "wrong.yaml").write_text("training: {group: 3}\n")
    with pytest.raises(ConfigError, match=r"wrong.yaml: unknown key 'training.group'"):
        compose([f"profile={tmp_path}/wrong.yaml"])
    (tmp_path / "kind.yaml").write_text("training: {groups: many}\n")
    with pytest.raises(ConfigError, match=r"training.groups must be a whole number"):
        compose([f"profile={tmp_path}/kind.yaml"])


def test_another_profile_for_a_run_that_is_resumed_is_refused_and_its_own_is_not(tmp_path: Path) -> None:
    recorded = tmp_path / "config.yaml"
    recorded.write_text("profile: laptop\ntraining:\n  groups: 8\n")
    assert compose(["profile=laptop"], recorded=recorded).config.training.groups == 8
    assert compose([], recorded=recorded).config.profile == "laptop"
    with pytest.raises(ConfigError, match="profile=one_gpu: a resumed run keeps its own keys"):
        compose(["profile=one_gpu"], recorded=recorded)
