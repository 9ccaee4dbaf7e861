"""Run by tests: processes that train under FSDP save a model each as verl's checkpoint manager does.

`python make_shards.py FOLDER`: four processes over gloo, then the first three and the first two of them. Each case is a folder with the
shards, fsdp_config.json and `huggingface` beside them, and the weights before they were sharded in `original`.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import AutoModelForTokenClassification, PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[2] / "engines"))
from architectures import build, config_of

ODD = {"intermediate_size": 49, "vocab_size": 97}
"""Sizes that no number of ranks divides."""


def shard(model: PreTrainedModel, world: int) -> PreTrainedModel:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    for layer in [part for part in model.modules() if type(part).__name__.endswith("DecoderLayer")]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def save(folder: Path, state: dict[str, Any], model: Any, version: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / f"model_world_size_{world}_rank_{rank}.pt")
    if rank == 0:
        model.config.save_pretrained(folder / "huggingface")
        text = json.dumps({"FSDP_version": version, "world_size": world})
        (folder / "fsdp_config.json").write_text(text)
    dist.barrier()


def keep(folder: Path, model: Any) -> None:
    if dist.get_rank() == 0:
        model.save_pretrained(folder / "original")


def second(folder: Path, model: PreTrainedModel) -> None:
    """FSDP2, as verl 0.9 does by default."""
    keep(folder, model)
    sharded = shard(model, dist.get_world_size())
    save(folder, sharded.state_dict(), sharded, 2)


def hybrid(folder: Path, model: PreTrainedModel) -> None:
    """Two groups that hold the same shards."""
    keep(folder, model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
    fully_shard(model, mesh=mesh)
    save(folder, model.state_dict(), model, 2)


def tensor_parallel(folder: Path, model: PreTrainedModel) -> None:
    """Matrices cut by tensor-parallel ranks, and what is left of them by FSDP."""
    keep(folder, model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    for name, part in model.named_modules():
        for key, parameter in list(part.named_parameters(recurse=False)):
            columns = name.endswith(("o_proj", "down_proj"))
            cut = Shard(1) if columns and key == "weight" else Shard(0) if name.endswith("proj") else Replicate()
            setattr(part, key, torch.nn.Parameter(distribute_tensor(parameter.data, mesh["tp"], [cut])))
    fully_shard(model, mesh=mesh["fsdp"])
    save(folder, model.state_dict(), model, 2)


def first(folder: Path, model: PreTrainedModel, *, meshed: bool) -> None:
    """FSDP1: with a mesh its shards are DTensors, without one ShardedTensors."""
    keep(folder, model)
    mesh = (
        {"device_mesh": init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))} if meshed else {}
    )
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=False, **mesh)
    with FullyShardedDataParallel.state_dict_type(
        wrapped, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=False)
    ):
        save(folder, wrapped.state_dict(), wrapped.module, 1)


def adapted(folder: Path, model: PreTrainedModel, *, alone: bool) -> None:
    """LoRA as verl has it: peft's model under FSDP2; `alone` saves the factors without the model."""
    from peft import LoraConfig, get_peft_model

    keep(folder, model)
    torch.manual_seed(5)
    wrapped = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    if dist.get_rank() == 0:
        tokens = torch.arange(1, 9)[None]
        with torch.no_grad():
            torch.save(wrapped(tokens).logits, folder / "logits.pt")
        wrapped.save_pretrained(folder / "peft")
    shard(wrapped, dist.get_world_size())
    state = {name: value for name, value in wrapped.state_dict().items() if not alone or "lora_" in name}
    save(folder, state, model, 2)
    if dist.get_rank() == 0:
        (folder / "lora_train_meta.json").write_text('{"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM"}')


def distributed(folder: Path, model: PreTrainedModel) -> None:
    """A distributed checkpoint of torch, with an optimiser beside the weights."""
    keep(folder, model)
    config = model.config
    sharded = shard(model, dist.get_world_size())
    weights = sharded.state_dict()
    moments = {name: torch.zeros_like(value) for name, value in weights.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": weights, "optimizer": {"exp_avg": moments}, "step": 3}, checkpoint_id=folder)
    if dist.get_rank() == 0:
        config.save_pretrained(folder / "huggingface")
    dist.barrier()


def cases_of_four(root: Path) -> None:
    hybrid(root / "four/hybrid", build("qwen3", **ODD))
    tensor_parallel(root / "four/tensor", build("qwen3", vocab_size=97, intermediate_size=50))


def cases_of_three(root: Path) -> None:
    second(root / "three/qwen3", build("qwen3", **ODD).bfloat16())
    second(root / "three/llama", build("llama", **ODD))
    adapted(root / "three/lora", build("qwen2"), alone=False)
    distributed(root / "three/dcp", build("qwen2", **ODD))


def cases_of_two(root: Path) -> None:
    second(root / "two/qwen2", build("qwen2"))
    first(root / "two/placed", build("llama", **ODD), meshed=True)
    first(root / "two/listed", build("qwen3", **ODD), meshed=False)
    adapted(root / "two/lora_alone", build("llama"), alone=True)
    second(root / "two/experts", build("qwen3_moe"))
    torch.manual_seed(3)
    second(root / "two/critic", AutoModelForTokenClassification.from_config(config_of("qwen2", num_labels=1)))


def go(rank: int, root: str) -> None:
    warnings.simplefilter("ignore")
    for world, cases in ((4, cases_of_four), (3, cases_of_three), (2, cases_of_two)):
        if rank < world:
            dist.init_process_group("gloo", init_method=f"file://{root}/meet{world}", rank=rank, world_size=world)
            cases(Path(root))
            dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(go, (sys.argv[1],), nprocs=4, start_method="fork")  # what is imported is imported once
