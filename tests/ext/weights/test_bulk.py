"""Every step of a run merged, what is whole skipped, what is broken passed over; and folders that appear whole."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.huggingface_folder import DecoderConfig
from turnwise.ext.weights.lazy_tensor import Stored, read_safetensors, same_bits
from turnwise.ext.weights.model_folder import MANIFEST, Form, write_weights

Turnwise = Callable[..., tuple[int, str]]


def sharded(step: Path, source: Path, ranks: int = 2) -> None:
    """A checkpoint of plain tensors, whole on every rank."""
    actor = step / "actor"
    actor.mkdir(parents=True)
    shutil.copytree(source, actor / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    for rank in range(ranks):
        torch.save(load_file(source / "model.safetensors"), actor / f"model_world_size_{ranks}_rank_{rank}.pt")
    (actor / "fsdp_config.json").write_text(json.dumps({"world_size": ranks, "FSDP_version": 2}))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = DecoderConfig("qwen3", 32, 16, 24, 2, 2, 1, 8, 64)
    Decoder.fresh(config, 1).save(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def run(model: Path, tmp_path: Path) -> Path:
    for step in (2, 10, 6):
        sharded(tmp_path / f"run/global_step_{step}", model)
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("10")
    return tmp_path / "run"


def test_all_steps_once_and_then_only_what_is_new(run: Path, model: Path, turnwise: Turnwise, tmp_path: Path) -> None:
    words = ("weights", "merge", run, tmp_path / "out", "--all", "--json")
    code, said = turnwise(*words)
    assert code == 0, said
    assert said.splitlines()[:4] == [
        *(f"global_step_{step}: merged" for step in (2, 6, 10)),
        "3 merged, 0 skipped, 0 failed",
    ]
    assert json.loads(said.splitlines()[-1]) == {
        "target": str(tmp_path / "out"),
        "merged": 3,
        "skipped": 0,
        "failed": 0,
    }
    for step in (2, 6, 10):
        found = load_file(tmp_path / f"out/global_step_{step}/model.safetensors")
        assert all(same_bits(found[name], tensor) for name, tensor in load_file(model / "model.safetensors").items())
    sharded(run / "global_step_14", model)
    before = (tmp_path / "out/global_step_6/model.safetensors").stat().st_mtime_ns
    code, said = turnwise(*words)
    assert code == 0 and "global_step_6: skipped (done already)" in said and "1 merged, 3 skipped, 0 failed" in said
    assert (tmp_path / "out/global_step_6/model.safetensors").stat().st_mtime_ns == before


def test_a_broken_step_does_not_stop_the_others(run: Path, turnwise: Turnwise, tmp_path: Path) -> None:
    (run / "global_step_6/actor/model_world_size_2_rank_1.pt").unlink()
    code, said = turnwise("weights", "merge", run, tmp_path / "out", "--all")
    assert code == 1 and "2 merged, 0 skipped, 1 failed" in said
    assert "global_step_6: failed (" in said and "lacks model_world_size_2_rank_1.pt" in said
    assert sorted(os.listdir(tmp_path / "out")) == ["global_step_10", "global_step_2"]


def test_half_written_and_outdated_ones_are_made_again(run: Path, turnwise: Turnwise, tmp_path: Path) -> None:
    words = ("weights", "merge", run, tmp_path / "out", "--all")
    assert turnwise(*words)[0] == 0
    cut = tmp_path / "out/global_step_2/model.safetensors"
    whole = cut.read_bytes()
    cut.write_bytes(whole[:-10])
    (tmp_path / "out/global_step_6/config.json").unlink()
    torch.save(
        {name: tensor + 1 for name, tensor in load_file(tmp_path / "out/global_step_10/model.safetensors").items()},
        run / "global_step_10/actor/model_world_size_2_rank_0.pt",
    )
    shutil.copy(*(run / f"global_step_10/actor/model_world_size_2_rank_{rank}.pt" for rank in (0, 1)))
    code, said = turnwise(*words)
    assert code == 0 and "3 merged" in said
    assert f"global_step_2: merged (again: model.safetensors is {len(whole) - 10} bytes, not {len(whole)})" in said
    assert "global_step_6: merged (again: config.json is missing)" in said
    assert "global_step_10: merged (again: its source or the options changed since)" in said
    assert cut.read_bytes() == whole
    assert "1 skipped" not in turnwise(*words, "--dtype", "bfloat16")[1], "another number format is other work"


def test_a_folder_of_somebody_else_is_left_alone(run: Path, turnwise: Turnwise, tmp_path: Path) -> None:
    (tmp_path / "out/global_step_6").mkdir(parents=True)
    (tmp_path / "out/global_step_6/model.safetensors").write_text("half a copy")
    code, said = turnwise("weights", "merge", run, tmp_path / "out", "--all")
    assert code == 1 and f"it has no {MANIFEST}: it is from elsewhere or incomplete; --force replaces it" in said
    assert (tmp_path / "out/global_step_6/model.safetensors").read_text() == "half a copy"
    code, said = turnwise("weights", "merge", tmp_path / "model", tmp_path / "out", "--all")
    assert code == 2 and "has no folders global_step_* or step_*" in said


def test_a_checkpoint_of_ours_and_a_step_by_name(run: Path, model: Path, turnwise: Turnwise, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "checkpoints/step_000004/policy")
    code, said = turnwise("weights", "merge", tmp_path / "checkpoints", tmp_path / "out", "--all", "--dtype", "float16")
    assert code == 0, said
    assert json.loads((tmp_path / "out/step_000004/config.json").read_text())["dtype"] == "float16"
    code, said = turnwise("weights", "merge", run, tmp_path / "one")
    assert code == 2 and "it has global_step_10, global_step_2, global_step_6: name one, or --all" in said
    assert turnwise("weights", "merge", run / "global_step_2", tmp_path / "one")[0] == 0


def test_a_distributed_checkpoint_of_ours(model: Path, turnwise: Turnwise, tmp_path: Path) -> None:
    """`learner` holds the masters by the decoder's names, moments and a critic beside them; `policy` the whole model."""
    step = tmp_path / "step_000004"
    decoder = Decoder.read(model)
    tensors = {f"policy.{name}": tensor for name, tensor in decoder.tensors().items()}
    more = {f"optimizer.policy.{name}.exp_avg": torch.zeros_like(tensor) for name, tensor in decoder.tensors().items()}
    critic = {f"critic.trunk.{name}": tensor + 1 for name, tensor in decoder.tensors().items()}
    dcp.save(tensors | more | critic, checkpoint_id=step / "learner", no_dist=True)
    shutil.copytree(model, step / "policy")
    for source in (step, step / "learner"):
        code, said = turnwise("weights", "merge", source, tmp_path / "out", "--force")
        assert code == 0, said
        found, wanted = (load_file(at / "model.safetensors") for at in (tmp_path / "out", model))
        assert found.keys() == wanted.keys() and all(same_bits(found[name], wanted[name]) for name in wanted)
        assert ("from a distributed checkpoint" in said) == (source.name == "learner")
    factors = {"policy.layers.0.q_proj_A": torch.ones(2, 16), "policy.layers.0.q_proj_B": torch.ones(16, 2)}
    dcp.save(factors, checkpoint_id=step / "adapter", no_dist=True)
    code, said = turnwise("weights", "merge", step / "adapter", tmp_path / "out", "--force")
    assert code == 2 and f"the whole model is in {step / 'policy'}" in said


# --- where it is written ------------------------------------------------------------------------------------------------


def test_nothing_is_overwritten_unless_asked_for(model: Path, turnwise: Turnwise, tmp_path: Path) -> None:
    target = tmp_path / "out"
    assert turnwise("weights", "merge", model, target)[0] == 0
    (target / "mark").touch()
    code, said = turnwise("weights", "merge", model, target)
    assert code == 2 and "exists; --force replaces it" in said and (target / "mark").exists()
    assert turnwise("weights", "merge", model, target, "--force", "--dtype", "bfloat16")[0] == 0
    assert not (target / "mark").exists()
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/thesis.txt").write_text("years")
    code, said = turnwise("weights", "merge", model, tmp_path / "precious", "--force")
    assert code == 2 and "is not a model's folder" in said and (tmp_path / "precious/thesis.txt").exists()
    for taken in (model, tmp_path):
        code, said = turnwise("weights", "merge", model, taken, "--force")
        assert code == 2 and "write to another place" in said and (model / "model.safetensors").exists()
    (tmp_path / "file").touch()
    code, said = turnwise("weights", "merge", model, tmp_path / "file", "--force")
    assert code == 2 and "is not a folder" in said
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []


def test_what_a_killed_process_left_is_removed_and_a_living_ones_is_not(
    model: Path, turnwise: Turnwise, tmp_path: Path
) -> None:
    code = (
        "import sys, time; from pathlib import Path; from turnwise.ext.weights.model_folder import appearing\n"
        "with appearing(Path(sys.argv[1]), False) as folder:\n"
        "    (folder / 'half').touch(); print(folder, flush=True); time.sleep(600)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, tmp_path / "out"], stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None
        half = Path(writer.stdout.readline().strip())
        assert turnwise("weights", "merge", model, tmp_path / "out")[0] == 0
        assert (half / "half").exists(), "somebody is writing it"
    finally:
        writer.kill()
        writer.wait()
    assert turnwise("weights", "merge", model, tmp_path / "out", "--force")[0] == 0
    assert not half.exists()


# --- memory -------------------------------------------------------------------------------------------------------------


def anonymous() -> int:
    """Bytes of memory that is no file's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path) -> None:
    each, many = 4 << 20, 24
    (tmp_path / "source").mkdir()
    save_file({f"t{index}": torch.ones(each // 4) for index in range(many)}, tmp_path / "source/model.safetensors")
    (tmp_path / "out").mkdir()
    stored: dict[str, Stored] = read_safetensors(tmp_path / "source")
    before, seen = anonymous(), [0]
    write_weights(
        tmp_path / "out", stored, Form(torch.bfloat16), "here", lambda size: seen.append(anonymous() - before)
    )
    assert len(seen) == many + 1 and max(seen) < 5 * each, "the whole is twenty-four times as much"
    assert sum(tensor.numel() for tensor in load_file(tmp_path / "out/model.safetensors").values()) == many * each // 4
