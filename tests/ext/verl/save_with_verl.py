"""Run by test_real_merger.py: two processes save a model with verl's own checkpoint manager.

`python save_with_verl.py FOLDER`, verl on the path.
"""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from omegaconf import OmegaConf
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

WORLD = 2


def go(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    contents = OmegaConf.create({"save_contents": ["model", "extra"], "load_contents": ["model"]})
    for version in (1, 2):
        model = AutoModelForCausalLM.from_pretrained(f"{folder}/original")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
        if version == 1:
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), device_mesh=mesh)
        else:
            fully_shard(model, mesh=mesh)
        tokenizer = AutoTokenizer.from_pretrained(f"{folder}/original")
        manager = FSDPCheckpointManager(model, None, None, tokenizer, contents)
        manager.save_checkpoint(f"{folder}/global_step_{version}/actor", global_step=version)
    dist.destroy_process_group()


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(exist_ok=True)
    mp.start_processes(go, (sys.argv[1],), nprocs=WORLD, start_method="fork")
