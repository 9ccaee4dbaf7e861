"""Tokens drawn on the device are those of the CPU sampler; a slot moves, stops and reports as a plain loop says."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from turnwise.engines.kernels import sampling
from turnwise.engines.kernels.logprobs import score_rows
from turnwise.engines.samplers import sampling as cpu_sampling
from turnwise.engines.samplers.request import SamplingParams


def noise_keys(count: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64).view(np.int64))


def normal(*shape: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread


def draw(
    logits: Tensor,
    device: str,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    keys: Tensor | None = None,
    places: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What `choose` gives, back on the CPU; one number stands for all rows."""
    count = len(logits)

    def column(value: float | Tensor | None, dtype: torch.dtype) -> Tensor | None:
        full = value if isinstance(value, Tensor) or value is None else torch.full((count,), value)
        return None if full is None else full.to(device=device, dtype=dtype)

    keys = noise_keys(count) if keys is None else keys
    places = torch.arange(count) if places is None else places
    ids, logprobs = sampling.choose(
        logits.to(device),
        keys.to(device),
        places.to(device=device, dtype=torch.int32),
        column(temperature, torch.float32),
        column(top_k, torch.int32),
        column(top_p, torch.float32),
    )
    assert ids.dtype == torch.int64 and logprobs.dtype == torch.float32 and ids.shape == logprobs.shape == (count,)
    assert ((ids >= 0) & (ids < logits.shape[1])).all()
    return ids.cpu(), logprobs.cpu()


def on_the_cpu(logits: Tensor, params: list[SamplingParams], keys: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    noise = cpu_sampling.uniforms(keys.numpy().view(np.uint64), places.numpy().astype(np.int64))
    return cpu_sampling.choose(logits, cpu_sampling.Rules.of(params), noise)


def assert_drawn(logits: Tensor, temperatures: Tensor, ids: Tensor, keys: Tensor, places: Tensor) -> None:
    """Each token's share of [0, 1) holds its noise, to a millionth: a GPU's exp rounds otherwise than a CPU's."""
    noise = sampling.uniforms(keys, places)
    scaled = logits.double() / torch.where(temperatures == 0.0, 1.0, temperatures).double().unsqueeze(1)
    upper = torch.softmax(scaled, -1).cumsum(-1)
    above = upper.gather(1, ids.unsqueeze(1)).squeeze(1)
    below = torch.where(ids == 0, 0.0, upper.gather(1, (ids - 1).clamp(min=0).unsqueeze(1)).squeeze(1))
    held = (below - 1e-6 <= noise) & (noise <= above + 1e-6)
    assert (held | (temperatures == 0.0)).all(), (~held).nonzero()
    assert torch.equal(ids[temperatures == 0.0], logits[temperatures == 0.0].argmax(-1))


def test_the_noise_is_that_of_the_cpu_sampler_to_the_bit() -> None:
    keys, places = noise_keys(2000), torch.arange(2000, dtype=torch.int32) * 31
    wanted = cpu_sampling.uniforms(keys.numpy().view(np.uint64), places.numpy().astype(np.int64))
    assert np.array_equal(sampling.uniforms(keys, places).numpy(), wanted)


def test_the_reference_draws_the_tokens_and_bits_of_the_cpu_sampler() -> None:
    params = [
        SamplingParams(1, temperature=t, top_k=k, top_p=p)
        for t in (0.0, 0.5, 1.0, 1.7)
        for k in (None, 1, 5, 4000)
        for p in (1.0, 0.5, 0.875)
    ] * 10
    logits, keys, places = normal(len(params), 777), noise_keys(len(params)), torch.arange(len(params)) * 7
    wanted = on_the_cpu(logits, params, keys, places)
    found = draw(
        logits,
        "cpu",
        torch.tensor([p.temperature for p in params]),
        torch.tensor([p.top_k or 0 for p in params]),
        torch.tensor([p.top_p for p in params]),
        keys,
        places,
    )
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    plain = [SamplingParams(1, temperature=t) for t in (0.0, 0.8, 1.0, 1.3)] * 1000
    logits, keys, places = normal(4000, 300, seed=2), noise_keys(4000, 1), torch.arange(4000)
    wanted = on_the_cpu(logits, plain, keys, places)
    found = draw(logits, "cpu", torch.tensor([p.temperature for p in plain]), keys=keys, places=places)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


@pytest.mark.parametrize(("count", "vocab"), [(3, 1), (40, 5), (24, 4096), (12, 9001), (2, 70000)])
def test_every_way_draws_the_tokens_of_the_cpu_sampler(device: str, count: int, vocab: int) -> None:
    logits, keys, places = normal(count, vocab, seed=vocab), noise_keys(count, vocab), torch.arange(count) * 3 + 1
    temperatures = [(1.0, 0.0, 0.7, 1.9)[i % 4] for i in range(count)]
    wanted = on_the_cpu(logits, [SamplingParams(1, temperature=t) for t in temperatures], keys, places)
    found = draw(logits, device, torch.tensor(temperatures), keys=keys, places=places)
    assert_drawn(logits, torch.tensor(temperatures), found[0], keys, places)
    same = found[0] == wanted[0]
    assert (~same).sum() <= (vocab > 5000), "rounding decides one draw in thousands"
    torch.testing.assert_close(found[1][same], wanted[1][same], atol=4e-6, rtol=1e-6)


def test_draws_follow_the_distribution(fast_device: str) -> None:
    logits = torch.full((5000,), -torch.inf)
    held = torch.tensor([0, 3, 1000, 4095, 4096, 4500, 4999])
    logits[held] = torch.tensor([0.0, 1.0, -2.0, 2.0, 0.5, 1.5, -0.5])
    for temperature in (1.0, 0.6):
        count = 4000
        ids, _ = draw(logits.expand(count, -1), fast_device, temperature, keys=torch.full((count,), 77))
        counts = torch.bincount(ids, minlength=5000)
        expected = count * torch.softmax(logits[held].double() / temperature, -1)
        assert counts[held].sum() == count, "a token that cannot happen was drawn"
        assert ((counts[held] - expected) ** 2 / expected).sum() < 22.5  # 6 degrees of freedom, p = 0.001


SHARES = torch.tensor([0.05, 0.4, 0.05, 0.3, 0.2])


def test_filters_stay_in_their_sets(fast_device: str) -> None:
    logits = SHARES.log().expand(120, -1)
    assert set(draw(logits, fast_device, top_k=2)[0].tolist()) == {1, 3}
    assert set(draw(logits, fast_device, top_p=0.69)[0].tolist()) == {1, 3}
    assert set(draw(logits, fast_device, top_p=0.01)[0].tolist()) == {1}
    assert set(draw(logits, fast_device, top_k=4)[0].tolist()) == {0, 1, 3, 4}, "of equal tokens the lower id stays"
    assert set(draw(logits, fast_device, top_k=2, top_p=0.5)[0].tolist()) == {1}


def test_rows_without_filters_draw_as_if_nobody_filtered(device: str) -> None:
    count = 14
    logits = SHARES.log().expand(count, -1)
    free = draw(logits, device)
    mixed = draw(logits, device, top_k=torch.arange(count) % 2)
    assert torch.equal(mixed[0][::2], free[0][::2]) and torch.equal(mixed[1][::2], free[1][::2])
    assert (mixed[0][1::2] == 1).all()
    wanted = torch.log_softmax(logits.double(), -1).gather(1, mixed[0].unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(mixed[1].double(), wanted, atol=1e-6, rtol=1e-6)


def test_ties_take_the_lowest_id_and_a_small_temperature_the_likeliest(device: str) -> None:
    logits = normal(4, 9000, seed=4)
    logits[0, [8999, 17, 5000]] = 50.0
    logits[1, [4096, 8192]] = 50.0
    logits[2] = 0.0
    logits[3, 8999] = 50.0
    assert draw(logits, device, 0.0)[0].tolist() == [17, 4096, 0, 8999]
    logits[0, [17, 5000]] = 0.0
    logits[1, 4096] = 0.0
    ids, logprobs = draw(logits, device, torch.tensor([1e-6, 1e-3, 0.0, 1e-2]))
    assert ids.tolist() == [8999, 8192, 0, 8999]
    torch.testing.assert_close(logprobs, torch.tensor([0.0, 0.0, -np.log(9000.0), 0.0]).float(), atol=2e-6, rtol=0)


def test_rows_that_have_no_distribution_say_nan(device: str) -> None:
    logits = torch.zeros(7, 5000)
    logits[1, 4] = torch.nan
    logits[2, 4999] = torch.nan
    logits[3] = -torch.inf
    logits[4] = torch.nan
    logits[5, :4097] = -torch.inf
    logits[6, :4999] = -torch.inf
    for temperature in (1.0, 0.5, 0.0):
        ids, logprobs = draw(logits, device, temperature)
        assert logprobs.isnan().tolist() == [False, True, True, True, True, False, False]
        assert ids[5] >= 4097 and ids[6] == 4999 and logprobs[6] == 0.0
        filtered = draw(logits, device, temperature, top_k=3)
        assert torch.equal(filtered[1].isnan(), logprobs.isnan())


def test_what_is_reported_is_what_the_learner_scores_in_any_company(device: str) -> None:
    logits, keys, places = normal(9, 9001, seed=5), noise_keys(9), torch.arange(9)
    for temperature in (1.0, 0.7, 0.0):
        ids, logprobs = draw(logits, device, temperature, keys=keys, places=places)
        scored = score_rows(logits.to(device), ids.to(device), temperature).logprobs.cpu()
        assert torch.equal(logprobs, scored)
        filtered = draw(logits, device, temperature, top_p=0.9, keys=keys, places=places)
        rescored = score_rows(logits.to(device), filtered[0].to(device), temperature).logprobs.cpu()
        assert torch.equal(filtered[1], rescored)
        for row in (0, 4, 8):
            one = slice(row, row + 1)
            alone = draw(logits.to(device)[one], device, temperature, keys=keys[one], places=places[one])
            assert alone[0][0] == ids[row] and alone[1][0] == logprobs[row]


def test_no_rows_are_no_trouble(device: str) -> None:
    ids, logprobs = draw(torch.zeros(0, 30), device)
    assert len(ids) == len(logprobs) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("vocab", [49152, 151936, 50257])
def test_a_gpu_draws_as_the_cpu_does_whatever_the_batch_and_inside_a_graph(vocab: int) -> None:
    count = 512
    logits, keys, places = (
        normal(count, vocab, spread=2.0).cuda(),
        noise_keys(count).cuda(),
        torch.arange(count).cuda().int(),
    )
    temperature = torch.tensor([(1.0, 0.8, 0.0, 1.0)[i % 4] for i in range(count)]).cuda()
    ids, logprobs = sampling.choose(logits, keys, places, temperature)
    params = [SamplingParams(1, temperature=round(t, 3)) for t in temperature.tolist()]
    wanted = on_the_cpu(logits.cpu(), params, keys.cpu(), places.cpu())
    assert_drawn(logits.cpu(), temperature.cpu(), ids.cpu(), keys.cpu(), places.cpu())
    same = ids.cpu() == wanted[0]
    assert (~same).sum() <= 8, "rounding decides few draws"
    torch.testing.assert_close(logprobs.cpu()[same], wanted[1][same], atol=1e-5, rtol=1e-6)
    for part in (slice(0, 1), slice(1, 2), slice(3, 70), slice(101, 255)):
        some = sampling.choose(logits[part], keys[part], places[part], temperature[part])
        assert torch.equal(some[0], ids[part]) and torch.equal(some[1], logprobs[part])
    ones = temperature == 1.0
    assert torch.equal(score_rows(logits[ones], ids[ones], 1.0).logprobs, logprobs[ones])
    tempered = temperature == torch.tensor(0.8)
    assert torch.equal(score_rows(logits[tempered], ids[tempered], 0.8).logprobs, logprobs[tempered])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = sampling.choose(logits, keys, places, temperature)
        filtered = sampling.choose(logits, keys, places, temperature, torch.full_like(places, 40))
    graph.replay()
    assert torch.equal(again[0], ids) and torch.equal(again[1], logprobs)
    assert torch.equal(filtered[1].isnan(), torch.zeros_like(ids, dtype=torch.bool))


@dataclass
class Slots:
    """The device's state of some slots, and lines for what they write."""

    count: int
    width: int
    lines: int
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tensors = {
            "active": torch.zeros(self.count, dtype=torch.int32),
            "last_token": torch.full((self.count,), -7),
            "places": torch.zeros(self.count, dtype=torch.int32),
            "remaining": torch.zeros(self.count, dtype=torch.int32),
            "stop_ids": torch.full((self.count, sampling.STOP_IDS), -1, dtype=torch.int32),
            "out_tokens": torch.full((self.lines, self.width), -99),
            "out_logprobs": torch.full((self.lines, self.width), 99.0),
            "step": torch.zeros(1, dtype=torch.int32),
        }

    def to(self, device: str) -> dict[str, Tensor]:
        return {name: tensor.clone().to(device) for name, tensor in self.tensors.items()}


def loop(state: dict[str, Tensor], tokens: Tensor, logprobs: Tensor, rows: Tensor) -> None:
    """The same one row at a time."""
    line = int(state["step"])
    if line == len(state["out_tokens"]):
        return
    for row, slot in enumerate(rows.tolist()):
        moving = slot >= 0 and bool(state["active"][slot])
        state["out_tokens"][line, row] = tokens[row] if moving else -1
        state["out_logprobs"][line, row] = logprobs[row] if moving else 0.0
        if not moving:
            continue
        state["last_token"][slot] = tokens[row]
        state["places"][slot] += 1
        state["remaining"][slot] -= 1
        over = int(state["remaining"][slot]) <= 0 or bool(logprobs[row].isnan())
        state["active"][slot] = int(not over and int(tokens[row]) not in state["stop_ids"][slot].tolist())
    state["step"] += 1


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_slots_move_as_a_plain_loop_moves_them(device: str, data: st.DataObject) -> None:
    slots, width = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    state = Slots(slots, width, lines=4)
    numbers = st.integers(0, 5)
    for slot in range(slots):
        state.tensors["active"][slot] = data.draw(st.sampled_from([1, 1, 0]))
        state.tensors["remaining"][slot] = data.draw(st.integers(1, 4))
        state.tensors["places"][slot] = data.draw(st.integers(0, 99))
        stops = data.draw(st.lists(numbers, max_size=sampling.STOP_IDS))
        state.tensors["stop_ids"][slot, : len(stops)] = torch.tensor(stops, dtype=torch.int32)
    wanted, found = state.to("cpu"), state.to(device)
    names = st.permutations(list(range(slots)) + [-1] * width)
    rows = torch.tensor(data.draw(names)[:width], dtype=torch.int32)
    for turn in range(5):
        tokens = torch.tensor([data.draw(numbers) for _ in range(width)])
        logprobs = torch.tensor([data.draw(st.sampled_from([-1.0, -0.25, -3.0, float("nan")])) for _ in range(width)])
        loop(wanted, tokens, logprobs, rows)
        sampling.advance(tokens.to(device), logprobs.to(device), rows.to(device), **found)
        for name, tensor in wanted.items():
            assert torch.equal(found[name].cpu().nan_to_num(-55), tensor.nan_to_num(-55)), (turn, name)


def test_many_rows_move_at_once(device: str) -> None:
    width = 1500
    state = Slots(width + 10, width, lines=2)
    state.tensors["remaining"] += 5
    state.tensors["stop_ids"][:, 7] = 3
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(width + 10, generator=generator)[:width].int()
    rows[::9] = -1
    state.tensors["active"][rows[rows >= 0].long()] = 1
    tokens, logprobs = torch.randint(0, 9, (width,), generator=generator), -torch.rand(width, generator=generator)
    wanted, found = state.to("cpu"), state.to(device)
    for _ in range(2):
        loop(wanted, tokens, logprobs, rows)
        sampling.advance(tokens.to(device), logprobs.to(device), rows.to(device), **found)
    for name, tensor in wanted.items():
        assert torch.equal(found[name].cpu(), tensor), name
    assert (wanted["out_tokens"][1] == -1).sum() > 200
