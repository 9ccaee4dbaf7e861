"""Checkpoints that verl itself saved, merged by `turnwise weights` and by verl's own merger: `make test-peers`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from turnwise.commands.cli import main

REAL, DEPS = os.environ.get("TURNWISE_VERL", ""), os.environ.get("TURNWISE_VERL_DEPS", "")
pytestmark = pytest.mark.skipif(not REAL, reason="TURNWISE_VERL names no folder with verl's files")
TINY = Path(__file__).parents[3] / "turnwise" / "engines" / "bundled" / "tiny"


def verl(*words: object) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{REAL}{os.pathsep}{DEPS}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, words)], env=environment, capture_output=True, text=True, check=False
    )
    wanted = next((line for line in done.stderr.splitlines() if line.startswith("ImportError:")), None)
    if wanted is not None:
        pytest.skip(f"this release of verl cannot run beside our packages: {wanted}")
    assert done.returncode == 0, done.stderr[-3000:]


def test_both_mergers_make_the_same_of_what_verl_saved(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(TINY, run / "original")
    verl(Path(__file__).parent / "save_with_verl.py", run)
    assert main(["weights", "merge", str(run), str(tmp_path / "exact"), "--all"]) == 0
    assert main(["weights", "merge", str(run), str(tmp_path / "narrow"), "--all", "--dtype", "bfloat16"]) == 0
    original = load_file(TINY / "model.safetensors")
    for version in (1, 2):
        step = f"global_step_{version}"
        found = load_file(tmp_path / "exact" / step / "model.safetensors")
        assert found.keys() == original.keys()
        assert all(found[name].dtype == tensor.dtype and found[name].equal(tensor) for name, tensor in original.items())
        template = (tmp_path / "exact" / step / "chat_template.jinja").read_text()
        assert template == (TINY / "chat_template.jinja").read_text()
        words = ("-m", "verl.model_merger", "merge", "--backend", "fsdp")
        verl(*words, "--local_dir", run / step / "actor", "--target_dir", tmp_path / "theirs" / step)
        theirs = load_file(tmp_path / "theirs" / step / "model.safetensors")
        ours = load_file(tmp_path / "narrow" / step / "model.safetensors")
        assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)
