"""What a transformers model does beside its layers: whether the host waits for it, and how it is made narrow."""

import torch
from architectures import VOCABULARY, build

from turnwise.engines.model.attention import packed, positions
from turnwise.engines.model.policy_model import ModelInputs
from turnwise.engines.model.transformers.model import TransformersModel

LENGTHS = (37, 9, 24)
TOKENS = torch.randint(VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
INPUTS = ModelInputs(TOKENS, positions(LENGTHS))


def test_a_pass_is_capturable_unless_the_host_waits_in_it() -> None:
    for kind in ("qwen3", "gemma2"):
        assert TransformersModel(build(kind)).shape.no_graphs is None, kind
    looped = TransformersModel(build("mixtral", experts_implementation="eager"))
    reason = looped.shape.no_graphs
    assert reason is not None and reason.startswith("MixtralForCausalLM calls aten.") and "the host waits" in reason


@torch.no_grad()
def test_narrow_parameters_leave_positions_their_digits() -> None:
    model = TransformersModel(build("qwen3"))
    expected = model.logits(model(INPUTS, packed(LENGTHS)))
    same = model.move(torch.device("cpu"), torch.bfloat16)
    assert same is model and model.dtype is torch.bfloat16
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    frequencies = {name: b.dtype for name, b in model.named_buffers() if name.endswith("inv_freq")}
    assert frequencies and set(frequencies.values()) == {torch.float32}
    found = model.logits(model(INPUTS, packed(LENGTHS)))
    assert found.dtype is torch.float32
    assert torch.cosine_similarity(found, expected, dim=1).min() > 0.99
