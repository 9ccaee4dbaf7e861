"""The files of examples/cluster: they parse, and the commands in them are ones that exist."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from turnwise.config.sections import section
from turnwise.data.task_config import compose
from turnwise.ext.ray.config import RayConfig
from turnwise.ext.ray.resource_needs import demands, sums

EXAMPLES = Path(__file__).parents[3] / "examples" / "cluster"


def composed(words: list[str]) -> Any:
    """The config of a `turnwise train` line."""
    assert words[:2] == ["turnwise", "train"]
    return compose([word.replace("$head:$port", "head:6379") for word in words[2:]]).config


def test_the_kuberay_job_starts_a_training_on_its_own_cluster() -> None:
    job = yaml.safe_load((EXAMPLES / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    config = composed(shlex.split(job["spec"]["entrypoint"]))
    assert config.cluster == "ray" and section(config, RayConfig).address == "auto"
    assert job["spec"]["backoffLimit"] > 0 and config.resume, "a job that is tried again goes on from its checkpoint"
    (gpus,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert gpus["maxReplicas"] == sums(demands(config, training=True))[1], "a GPU for each sampler and each rank"
    groups = [job["spec"]["rayClusterSpec"]["headGroupSpec"], gpus]
    for group in groups:
        mounts = group["template"]["spec"]["containers"][0]["volumeMounts"]
        assert [mount["mountPath"] for mount in mounts] == [config.runs_dir], "every pod sees the run"


def test_the_image_has_what_the_job_runs() -> None:
    """It is read here, not built."""
    text = re.sub(r"\\\n\s*", " ", (EXAMPLES / "Dockerfile").read_text())
    root = EXAMPLES.parents[1]
    for line in (line for line in text.splitlines() if line.startswith("COPY ")):
        assert [name for name in line.split()[1:-1] if not (root / name).exists()] == []
    job = yaml.safe_load((EXAMPLES / "rayjob.yaml").read_text())
    assert re.findall(r"^ARG RAY=(.*)$", text, re.MULTILINE) == [job["spec"]["rayClusterSpec"]["rayVersion"]]
    known = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (extras,) = re.findall(r'"/turnwise\[(.*?)\]"', text)
    assert "cluster" in extras.split(",") and set(extras.split(",")) <= known.keys()
    assert re.search(r"^USER (?!root)", text, re.MULTILINE)


def test_the_slurm_script_parses_and_its_training_is_one() -> None:
    path = EXAMPLES / "train.sbatch"
    text = path.read_text()
    assert "#SBATCH --requeue" in text
    if (bash := shutil.which("bash")) is not None:
        assert subprocess.run([bash, "-n", str(path)], capture_output=True, text=True).stderr == ""
    joined = re.sub(r"\\\n\s*", " ", text)
    (line,) = (line for line in joined.splitlines() if "turnwise train" in line)
    words = shlex.split(line.removesuffix("&"))
    config = composed(words[words.index("turnwise") :])
    nodes, gpus = (int(re.findall(rf"--{name}=(\d+)", text)[0]) for name in ("nodes", "gpus-per-node"))
    assert sums(demands(config, training=True))[1] == nodes * gpus


def test_the_options_of_ray_start_exist() -> None:
    if find_spec("ray") is None:
        pytest.skip("ray is not installed")
    text = (EXAMPLES / "train.sbatch").read_text()
    ray = [sys.executable, "-c", "from ray.scripts.scripts import cli; cli()", "start", "--help"]
    known = subprocess.run(ray, capture_output=True, text=True, check=True).stdout
    used = {word for line in text.splitlines() if " ray start" in f" {line}" for word in re.findall(r"--[a-z-]+", line)}
    used -= {"--nodes", "--ntasks", "--nodelist", "--exclude"}
    assert used == {"--head", "--port", "--include-dashboard", "--block", "--address"}
    assert [word for word in used if word not in known] == []
