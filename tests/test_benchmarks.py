"""Every benchmark imports what there is; in the long tail it runs, small: it ends in figures and not in a traceback."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SMALL = {
    "board": ["--steps", "20", "--per-step", "4", "--requests", "5"],
    "gpu_learner": ["--steps", "1"],
    "gpu_rollout": [],
    "gpu_train": [],
    "house": [],
    "images": ["--conversations", "4", "--rounds", "1"],
    "learner": ["--rounds", "1", "--seconds", "0.2", "--cases", "tiny"],
    "learner_place": ["--rounds", "1", "--steps", "1", "--groups", "2", "--siblings", "2"],
    "parsers": ["--inputs", "50", "--formats", "hermes"],
    "rollout": ["--episodes", "16", "--many", "32", "--rounds", "1", "--scale", "0.01"],
    "sampler_cpu": ["--episodes", "4", "--repeats", "1"],
    "sampler_vllm": [],
    "sandbox": ["--quick", "--most", "4"],
    "scale": ["--parts", "rollout", "--samplers", "1", "--conversations", "4", "--rate", "2000"],
    "scale_episodes": ["--workers", "0", "--turn-seconds", "0", "--samples", "4", "--at-once", "4", "--nodes", "1"],
    "scoring": ["--trajectories", "20", "--rounds", "1"],
    "sdk_agents": ["--agents", "3"],
    "sessions": ["--sessions", "5", "--rounds", "1"],
    "workers": ["--model", "tiny", "--workers", "0", "1", "--samples", "1", "3"],
    "tinylook_ceilings": ["--train", "60", "--test", "20"],
    "vllm_as_sampler": [],
    "train_cpu": ["--steps", "1", "--prompts", "2", "--siblings", "2", "--threads", "1"],
}
"""What makes each of them small."""


def test_every_benchmark_is_tried():
    assert sorted(SMALL) == sorted(path.stem for path in BENCHMARKS.glob("*.py"))


@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_imports_what_there_is_and_knows_its_options(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
    told = capsys.readouterr().out
    assert ended.value.code == 0 and all(word in told for word in SMALL[name] if word.startswith("--"))


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_ends_in_figures(name: str, tmp_path: Path):
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *SMALL[name]]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert any(letter.isdigit() for letter in ended.stdout) or "needs" in ended.stdout or "not run" in ended.stdout, (
        ended.stdout
    )
