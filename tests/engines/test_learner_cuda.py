"""On a GPU the learner computes what it computes on the CPU, in float32 closely and in bfloat16 nearly."""

import pytest
import torch
from batches import accumulate, score
from torch import Tensor
from torch.nn import functional

from turnwise.config import LearnerConfig
from turnwise.config.choices import Precision
from turnwise.engines.learners.critic import Critic
from turnwise.engines.learners.learner import Who
from turnwise.engines.learners.local import LocalLearner
from turnwise.engines.learners.losses import PolicyTokens
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.huggingface_folder import DecoderConfig
from turnwise.engines.model.lora import LoraDecoder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

LENGTHS = [40, 17, 64, 33, 8]
INDEX = torch.tensor([i for i in range(sum(LENGTHS)) if i % 7 not in (0, 1) and i not in (40, 57, 121, 154)])
TOKENS = torch.randint(0, 256, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))


def make(device: str, precision: Precision | None, lora: bool, recompute: bool = False) -> LocalLearner:
    policy = Decoder.fresh(DecoderConfig("qwen3", 256, 128, 256, 3, 4, 2, 32, 512), 3)
    critic = Critic.copying(policy)
    if lora:
        policy = LoraDecoder(policy, rank=8, alpha=32.0, seed=1)
    config = LearnerConfig(
        lr=1e-3, critic_lr=1e-3, device=device, precision=precision, gradient_checkpointing=recompute
    )
    return LocalLearner(policy, config, temperature=0.9, critic=critic, reference=True, chunk_tokens=50)


def loss(found: PolicyTokens) -> tuple[Tensor, dict[str, float]]:
    assert found.values is not None and found.values.dtype == found.logprobs.dtype == torch.float32
    wanted = torch.linspace(-1, 1, len(found.values), device=found.values.device)
    total = -(found.logprobs * wanted).mean() - 0.1 * found.entropy.mean() + (found.values - wanted).square().mean()
    return total, {}


def gradient(learner: LocalLearner) -> Tensor:
    accumulate(learner, (TOKENS, LENGTHS, INDEX), loss)
    assert learner.critic is not None
    parameters = [*learner.model.parameters(), *learner.critic.parameters()]
    return torch.cat([p.grad.flatten().cpu() for p in parameters if p.grad is not None])


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_those_of_the_cpu(lora: bool, recompute: bool) -> None:
    on_cpu = gradient(make("cpu", None, lora))
    wide = gradient(make("cuda", Precision.float32, lora, recompute))
    narrow = gradient(make("cuda", None, lora, recompute))
    torch.testing.assert_close(wide, on_cpu, atol=1e-4, rtol=1e-3)
    assert functional.cosine_similarity(narrow, on_cpu, dim=0) > 0.995
    assert not torch.equal(narrow, wide)


@pytest.mark.parametrize("lora", [False, True])
def test_steps_states_and_publishing_cross_devices(lora: bool) -> None:
    one = make("cuda", None, lora)
    before = score(one, (TOKENS, LENGTHS, INDEX))
    for _ in range(3):
        gradient(one)
        one.optim_step()
    torch.testing.assert_close(score(one, (TOKENS, LENGTHS, INDEX), Who.REFERENCE), before, atol=1e-5, rtol=1e-5)
    tensors, info = one.state()
    two = make("cpu", None, lora)
    two.load_state({name: tensor.cpu() for name, tensor in tensors.items()}, info)
    published = {name: tensor.cpu() for name, tensor in one.model.tensors().items()}
    for name, tensor in two.model.tensors().items():  # without LoRA published weights are the float32 ones, rounded
        torch.testing.assert_close(tensor.to(published[name].dtype), published[name], atol=1e-5, rtol=1e-5)
    after = score(one, (TOKENS, LENGTHS, INDEX))
    torch.testing.assert_close(score(two, (TOKENS, LENGTHS, INDEX)), after, atol=0.03, rtol=0.03)
    assert (after - before).abs().max() > 0.03
