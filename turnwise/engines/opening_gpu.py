"""Opens the sampler of a GPU, and the learner beside it."""

from typing import TYPE_CHECKING

from turnwise.chat.renderer import Renderer
from turnwise.choices import ModelImplementation
from turnwise.config import Config
from turnwise.engines.devices import Chosen
from turnwise.engines.memory_plan import MemoryPlan, memory_here, shares_weights
from turnwise.engines.opened import OpenEngines, OpenSampler, Say, Together, check_sight, dtype_of, read_policy
from turnwise.engines.opening_learner import open_learner, shares_kernels

if TYPE_CHECKING:
    import torch

    from turnwise.engines.device_clock import DeviceClock
    from turnwise.engines.model.policy_model import PolicyModel

UNKNOWN_CACHE = 0.3
"""The share of a GPU's free memory that becomes cache where nothing is known of the model's sizes."""


def open_cuda(
    config: Config,
    chosen: Chosen,
    renderer: Renderer,
    say: Say,
    *,
    model: "PolicyModel | None" = None,
    memory: MemoryPlan | None = None,
    clock: "DeviceClock | None" = None,
) -> OpenSampler:
    """The sampler of a GPU; `memory` says how large its cache may be, `model` is there already and in its format."""
    import torch

    from turnwise.engines.model.decoder import Decoder
    from turnwise.engines.samplers.cuda import CudaSampler
    from turnwise.engines.samplers.threads import usable_cores

    device, dtype = torch.device(chosen.device), dtype_of(chosen.precision)
    invariant = shares_kernels(config, chosen)
    model = _on_gpu(model or read_policy(config, chosen.precision), device, dtype, invariant)
    check_sight(model, renderer, say)
    memory = memory or memory_here(config, None)
    cache = int(torch.cuda.mem_get_info(device)[0] * UNKNOWN_CACHE) if memory is None else memory.cache
    sampler = CudaSampler(
        model,
        device=device,
        decode=renderer.tokenizer.decode,
        max_batch=chosen.max_batch,
        cache_bytes=cache,
        invariant=invariant,
        clock=clock,
        say=lambda text: say(f"cuda engine: {text}"),
    )
    promise = "what a conversation's tokens are depends on rounding, which other conversations in a batch can change"
    if invariant:
        promise = "a conversation's tokens do not depend on what else is computed (batch-invariant kernels)"
    elif chosen.batch_invariant and not isinstance(model, Decoder):
        promise = f"batch-invariant kernels are of the native implementation only: {promise}"
    say(f"cuda engine: {chosen.precision.value}, at most {chosen.max_batch} sequences at once; {promise}")
    say(f"cuda engine: {sampler.capabilities}")
    return OpenSampler(sampler, config.engine.threads or usable_cores())


def _on_gpu(model: "PolicyModel", device: "torch.device", dtype: "torch.dtype", invariant: bool) -> "PolicyModel":
    """A model as the GPU's sampler computes it; tensors that already are as wanted are shared, not copied."""
    from turnwise.engines.model.decoder import Decoder
    from turnwise.engines.model.fused_decoder import FusedDecoder

    if isinstance(model, Decoder):
        return FusedDecoder.of(model, device=device, dtype=dtype, invariant=invariant)
    return model.move(device, dtype)


def open_on_gpu(given: Together) -> OpenEngines:
    """A sampler on the GPU, and the learner beside it or on the CPU. A native model is read once."""
    import torch

    from turnwise.engines.device_clock import DeviceClock

    config, chosen, memory = given.config, given.chosen, given.memory
    learner = open_learner(config, given.renderer, given.parts, memory=memory, say=given.say)
    device, clock = torch.device(chosen.device), DeviceClock(torch.device(chosen.device))
    same = learner.device == device and not config.learner.lora_rank
    writer = _writer(config, chosen, learner.model, share=same)
    opened = open_cuda(config, chosen, given.renderer, given.say, model=writer, memory=memory, clock=clock)
    given.keep(opened.sampler)
    torch.set_num_threads(opened.threads)
    same = same and {p.dtype for p in learner.model.parameters()} == {dtype_of(chosen.precision)}
    exact = same and shares_kernels(config, chosen)
    if chosen.batch_invariant and not exact:
        given.say(
            "engine.batch_invariant: log-probs of sampler and learner agree to rounding only; they are equal to the "
            "last bit where all weights of a native model are trained, on the sampler's device and in its precision"
        )
    turns = bool(config.engine.sleep) if memory is None else memory.takes_turns
    return OpenEngines(opened.sampler, learner, exact, opened.threads, turns, clock)


def _writer(config: Config, chosen: Chosen, trained: "PolicyModel", *, share: bool) -> "PolicyModel":
    """What the GPU's sampler writes with: the learner's own tensors where it may, else a copy, an adapter merged."""
    import torch

    from turnwise.engines.model.decoder import Decoder
    from turnwise.engines.model.fused_decoder import FusedDecoder

    if not isinstance(trained, Decoder):
        return read_policy(config, chosen.precision)
    if share and isinstance(trained, FusedDecoder) and shares_weights(config, chosen, ModelImplementation.native):
        return FusedDecoder.sharing(trained)
    device, dtype = torch.device(chosen.device), dtype_of(chosen.precision)
    copies = {name: tensor.detach().to(device, dtype, copy=True) for name, tensor in trained.tensors().items()}
    return Decoder(trained.config, copies)
