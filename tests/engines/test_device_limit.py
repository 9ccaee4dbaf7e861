"""A process is held to its share of a GPU, with what lies outside of PyTorch's allocator taken off."""

from collections.abc import Iterator

import pytest
import torch

from turnwise import configure
from turnwise.engines.device_limit import LEAST_OUTSIDE, allocator_share, hold_to
from turnwise.engines.devices import Gpu, VisibleGpus, choose
from turnwise.engines.memory_plan import (
    KEPT_FEATURES,
    OVERHEAD,
    MemoryHolder,
    MemoryPlan,
    ModelSize,
    Training,
    plan_memory,
)

GIB = 2**30
SIZE = ModelSize(7_615_616_512, 3584, 28, 152_064, 28_672)


def plan(*overrides: str, size: ModelSize = SIZE) -> MemoryPlan:
    config, gpu = configure("engine=cuda", "task=null", "data.eval_files=[x]", *overrides), Gpu("large", 140 * GIB)
    return plan_memory(config, choose(config, VisibleGpus((gpu,))), gpu, size, 1536, Training(), shared=False)


def test_what_lies_outside_of_the_allocator_is_taken_off_and_other_programs_are_not() -> None:
    assert allocator_share(10 * GIB, GIB) == 9 * GIB
    assert allocator_share(10 * GIB, 0) == 10 * GIB - LEAST_OUTSIDE
    assert allocator_share(10 * GIB, 60 * GIB) == 10 * GIB - OVERHEAD
    assert allocator_share(GIB, 60 * GIB) == 0
    hold_to(torch.device("cpu"), 1)  # there is nothing to hold


@pytest.mark.parametrize("knobs", [("learner.lora_rank=16",), ("learner.lora_rank=16", "engine.max_batch=64")])
def test_two_processes_together_hold_what_one_may(knobs: tuple[str, ...]) -> None:
    found = plan("training.max_lag=1", *knobs)
    sampler, learner = found.share(MemoryHolder.sampler), found.share(MemoryHolder.learner)
    assert found.share(MemoryHolder.both) == found.usable == sampler + learner
    assert sampler == 2 * SIZE.weights + found.cache + OVERHEAD // 2
    assert learner >= 4 * SIZE.weights + found.optimizer + found.learning + LEAST_OUTSIDE


def test_processes_that_take_turns_are_each_left_what_the_other_gives_back() -> None:
    found = plan("training.max_lag=0", "engine.sleep=true", "learner.lora_rank=16")
    assert found.takes_turns
    at_rest = found.share(MemoryHolder.sampler) - found.cache
    assert found.share(MemoryHolder.learner) == found.usable - at_rest
    sees = plan("learner.lora_rank=16", size=ModelSize(SIZE.weights, 3584, 28, 152_064, 28_672, vision=10**8))
    assert sees.share(MemoryHolder.sampler) == sees.writers + KEPT_FEATURES + sees.cache + OVERHEAD // 2


@pytest.fixture
def card() -> Iterator[int]:
    """The bytes of a whole GPU, whose limit is taken off again."""
    device = torch.device("cuda", 0)
    yield torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_an_allocation_beyond_the_share_is_refused_and_one_within_is_not(card: int) -> None:
    device = torch.device("cuda", 0)
    torch.cuda.empty_cache()
    hold_to(device, torch.cuda.memory_reserved(device) + OVERHEAD + GIB)
    assert torch.empty(GIB // 2, dtype=torch.uint8, device=device).is_cuda
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(4 * GIB, dtype=torch.uint8, device=device)
    hold_to(device, 0.9)
    assert torch.cuda.get_per_process_memory_fraction(device) < 0.9 - LEAST_OUTSIDE / card + 1e-6
