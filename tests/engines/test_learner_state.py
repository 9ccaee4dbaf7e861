"""A learner goes on from its saved state as if it had never stopped, and refuses the state of another."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from batches import accumulate, score
from safetensors.torch import load_file, save_file
from torch import Tensor

from turnwise.config import LearnerConfig
from turnwise.config.choices import Decay
from turnwise.engines.learners.critic import Critic
from turnwise.engines.learners.learner import Who
from turnwise.engines.learners.local import LocalLearner
from turnwise.engines.learners.losses import PolicyTokens
from turnwise.engines.learners.state import FILE, fingerprint, read_state
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.lora import LoraDecoder
from turnwise.errors import EngineError, StorageError

KINDS = ("full", "lora", "critic", "shared")
LENGTHS = [11, 23, 8]
INDEX = torch.tensor([*range(3, 10), *range(13, 20), *range(22, 30), *range(36, 42)])


def make(decoder: Decoder, kind: str, rank: int = 4) -> LocalLearner:
    policy: Decoder = Decoder(decoder.config, {name: tensor.clone() for name, tensor in decoder.tensors().items()})
    critic = {"critic": Critic.copying, "shared": Critic.sharing}.get(kind)
    if kind == "lora":
        policy = LoraDecoder(policy, rank=rank, alpha=32.0, targets=("q_proj", "v_proj", "down_proj"), seed=3)
    config = LearnerConfig(lr=1e-3, critic_lr=3e-3, weight_decay=0.1, warmup=2, decay=Decay.linear)
    made = None if critic is None else critic(policy)
    return LocalLearner(policy, config, temperature=1.0, critic=made, reference=True, updates=9)


def train(learner: LocalLearner, steps: int) -> list[dict[str, float]]:
    def loss(found: PolicyTokens) -> tuple[Tensor, dict[str, float]]:
        total = -found.logprobs.mean() - 0.01 * found.entropy.mean()
        if found.values is not None:
            total = total + (found.values - torch.linspace(0, 1, len(found.values))).square().mean()
        return total, {}

    metrics = []
    for _ in range(steps):
        seeded = torch.Generator().manual_seed(learner.step)
        tokens = torch.randint(0, 96, (sum(LENGTHS),), generator=seeded)
        found = accumulate(learner, (tokens, LENGTHS, INDEX), loss)
        metrics.append(found | learner.optim_step())
    return metrics


def save(learner: LocalLearner, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Through the file a checkpoint is made of."""
    learner.save(folder)
    return read_state(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_four_steps_are_two_and_two(decoder: Decoder, kind: str, tmp_path: Path) -> None:
    straight = make(decoder, kind)
    expected = train(straight, 4)
    first = make(decoder, kind)
    got = train(first, 2)
    saved = save(first, tmp_path)
    second = make(decoder, kind)
    train(second, 1)  # what it did before must leave no trace
    second.load_state(*saved)
    assert second.step == 2
    got += train(second, 2)
    assert got == expected
    for learner in (second, straight):
        assert learner.step == 4
    (one, info_one), (two, info_two) = straight.state(), second.state()
    assert info_one == info_two and one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []
    assert any(name.endswith(".exp_avg") and float(tensor.abs().max()) > 0 for name, tensor in one.items())


def test_a_fresh_state_loads_too(decoder: Decoder, tmp_path: Path) -> None:
    saved = save(make(decoder, "full"), tmp_path)
    used = make(decoder, "full")
    train(used, 2)
    used.load_state(*saved)
    assert train(used, 2) == train(make(decoder, "full"), 2)


def test_the_base_is_not_in_a_lora_state(decoder: Decoder) -> None:
    tensors, info = make(decoder, "lora").state()
    assert len(tensors) == 2 * 3 * 2 and all(name.split(".")[-1].split("_")[-1] in "AB" for name in tensors)
    assert info["base"] == fingerprint(decoder.tensors())
    changed = decoder.tensors() | {"norm": decoder.tensors()["norm"] * 1.0001}
    assert info["base"] != fingerprint(changed)


def test_states_of_others_are_refused_and_change_nothing(decoder: Decoder, tmp_path: Path) -> None:
    learner = make(decoder, "full")
    tensors, info = save(learner, tmp_path)
    before = {name: tensor.clone() for name, tensor in learner.model.tensors().items()}
    tensors["policy.embed"] = tensors["policy.embed"] + 1
    lacking = {name: tensor for name, tensor in tensors.items() if name != "policy.norm"}
    wrong: list[tuple[dict[str, Tensor], dict[str, Any], str]] = [
        (lacking, info, "policy.norm"),
        (tensors | {"policy.norm": tensors["policy.norm"][:-1]}, info, "policy.norm"),
        (tensors | {"policy.norm": tensors["policy.norm"].double()}, info, "float64"),
        (tensors | {"policy.more": tensors["policy.norm"]}, info, "policy.more"),
        (tensors | {"optimizer.critic.bias.step": tensors["policy.norm"]}, info, "optimizer.critic"),
        (tensors | {"optimizer.policy.norm.exp_avg": torch.zeros(3)}, info, "exp_avg"),
        (*make(decoder, "lora").state(), "lora was .*'rank': 4.* and is None"),
        (*make(decoder, "critic").state(), "model: critic was 'own' and is None$"),
        (tensors, info | {"decoder": info["decoder"] | {"num_layers": 9}}, "decoder.num_layers was 9 and is 2$"),
    ]
    for given, told, words in wrong:
        with pytest.raises(EngineError, match=words):
            learner.load_state(given, told)
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.model.tensors().items())
    other_base = make(decoder, "lora")
    other_base.model.get_parameter("layers.0.qkv").data.mul_(2.0)
    with pytest.raises(EngineError, match="model: base was"):
        other_base.load_state(*make(decoder, "lora").state())


def test_waiting_gradients_are_not_lost_silently(decoder: Decoder) -> None:
    learner = make(decoder, "full")
    accumulate(learner, (torch.arange(42), LENGTHS, INDEX), lambda found: (found.logprobs.sum(), {}))
    with pytest.raises(EngineError, match="gradients that no step has used yet"):
        learner.state()


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_saved_policy_is_a_hugging_face_folder(decoder: Decoder, kind: str, tmp_path: Path) -> None:
    learner = make(decoder, kind)
    train(learner, 3)
    learner.model.save(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = torch.randint(0, 96, (30,), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        every = torch.log_softmax(model(tokens[None]).logits[0], -1)
    theirs = every[:-1].gather(1, tokens[1:, None]).squeeze(1)
    ours = score(learner, (tokens, [30], torch.arange(1, 30)))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_the_reference_stays_where_it_was_made(decoder: Decoder) -> None:
    case = (torch.arange(42), LENGTHS, INDEX)
    for kind in ("full", "lora"):
        learner = make(decoder, kind)
        start = score(learner, case)
        train(learner, 3)
        torch.testing.assert_close(score(learner, case, Who.REFERENCE), start, atol=1e-6, rtol=1e-6)
        assert (score(learner, case) - start).abs().max() > 0.01
        assert (learner._start is None) == (kind == "lora"), "the base of an adapter is not copied"


def test_a_state_needs_no_file(decoder: Decoder) -> None:
    """What `state` returns fits as it is, tuples of the config included."""
    one, two = make(decoder, "lora"), make(decoder, "lora")
    train(one, 2)
    two.load_state(*one.state())
    assert train(two, 1) == train(one, 1)
    with pytest.raises(EngineError, match="lora.rank was 4 and is 2"):
        make(decoder, "lora", rank=2).load_state(*one.state())


def test_files_of_other_formats_and_broken_ones_are_refused_by_name(decoder: Decoder, tmp_path: Path) -> None:
    learner = make(decoder, "full")
    learner.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    whole, tensors = (tmp_path / FILE).read_bytes(), load_file(tmp_path / FILE)
    save_file(tensors, tmp_path / FILE)  # as format 1 was, whose JSON lay elsewhere
    with pytest.raises(StorageError, match=f"{FILE} has format 1 and this version of turnwise reads format 2"):
        learner.load(tmp_path)
    save_file(tensors, tmp_path / FILE, {"learner": json.dumps({"format": 3})})
    with pytest.raises(StorageError, match="has format 3"):
        learner.load(tmp_path)
    for broken in (whole[:1000], b"", b"no tensors at all"):
        (tmp_path / FILE).write_bytes(broken)
        with pytest.raises(StorageError, match=f"cannot read .*{FILE}"):
            learner.load(tmp_path)
    save_file(tensors, tmp_path / FILE, {"learner": "[]"})
    with pytest.raises(StorageError, match=f"cannot read .*{FILE}"):
        learner.load(tmp_path)
    with pytest.raises(StorageError, match="No such file"):
        learner.load(tmp_path / "nowhere")
    (tmp_path / FILE).write_bytes(whole)
    learner.load(tmp_path)


def test_scores_that_nobody_prepared_are_refused_by_name(decoder: Decoder) -> None:
    case = (torch.arange(42), LENGTHS, INDEX)
    plain = LocalLearner(decoder, LearnerConfig(), temperature=1.0)
    for who, words in ((Who.REFERENCE, "no reference policy"), (Who.CRITIC, "no critic"), (Who.SAMPLER, "regime")):
        with pytest.raises(EngineError, match=words):
            score(plain, case, who)
    lora = LoraDecoder(decoder, rank=2, alpha=4.0, seed=0)
    with pytest.raises(EngineError, match="before the adapter is added"):
        Critic.copying(lora)
