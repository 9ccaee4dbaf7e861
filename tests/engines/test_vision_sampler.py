"""A sampler that sees: turns with tool images are one full forward pass, whatever was cached, shared, cut or slept on."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from architectures import build as build_text
from seeing import IMAGE, KINDS, Shown, build, logits, plain_logits, prepared, shown

from turnwise.engines.model.attention import Regime
from turnwise.engines.model.policy_model import PolicyModel
from turnwise.engines.model.transformers.model import TransformersModel
from turnwise.engines.model.vision_model import VisionModel
from turnwise.engines.samplers.cpu import batching
from turnwise.engines.samplers.cpu.torch_cpu import TorchSampler
from turnwise.engines.samplers.gpu.cuda import CudaSampler
from turnwise.engines.samplers.gpu.steps import page_bytes
from turnwise.engines.samplers.in_process import InProcessSampler
from turnwise.engines.samplers.kv_cache import PREFIX_BLOCK, block_hashes
from turnwise.engines.samplers.request import NoiseKey, Request, SamplingParams
from turnwise.engines.weight_updates import FullWeights
from turnwise.errors import EngineError
from turnwise.ledger import Media, MediaSpan
from turnwise.types import Completion

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
PARAMS = SamplingParams(max_tokens=6, temperature=0.8)


def on_cpu(model: PolicyModel) -> InProcessSampler:
    return TorchSampler(model, decode=str, max_batch=4, threads=1, regime=Regime(1, 2, 32))


def paged(device: str) -> Callable[[PolicyModel], InProcessSampler]:
    """The GPU's sampler; on the CPU by the references of its kernels."""

    def make(model: PolicyModel) -> InProcessSampler:
        place = torch.device(device)
        return CudaSampler(
            model.move(place, torch.float32),
            device=place,
            decode=str,
            max_batch=4,
            cache_bytes=100 * page_bytes(model.shape.caches, torch.float32),
            invariant=False,
            steps_per_run=3,
            prefill_tokens=64,
        )

    return make


MAKERS: dict[str, Callable[[PolicyModel], InProcessSampler]] = {
    "torch": on_cpu,
    "paged": paged("cpu"),
    "cuda": paged("cuda"),
}


@pytest.fixture(params=["torch", "paged", pytest.param("cuda", marks=GPU)])
def opened(request: pytest.FixtureRequest) -> Callable[[PolicyModel], InProcessSampler]:
    return MAKERS[request.param]


@dataclass
class Conversation:
    """What was said so far, with the log-probs of what the policy wrote."""

    kind: str
    name: str
    said: Shown
    written: list[int] = field(default_factory=list)
    """Places of the policy's tokens."""
    logprobs: list[float] = field(default_factory=list)

    def request(self, params: SamplingParams = PARAMS) -> Request:
        return Request(self.name, self.said.ids, params, NoiseKey(1, 0, self.name, 0), self.said.media)

    def hear(self, completion: Completion) -> None:
        start = len(self.said.ids)
        self.written += range(start, start + len(completion.token_ids))
        self.logprobs += completion.logprobs.tolist()
        self.said = Shown(np.concatenate((self.said.ids, completion.token_ids)), self.said.media)

    def tool(self, seed: int, *parts: int | tuple[int, int]) -> None:
        """An observation with images is appended."""
        more = shown(self.kind, seed, *parts)
        spans = tuple(span.shifted(len(self.said.ids)) for span in more.media)
        self.said = Shown(np.concatenate((self.said.ids, more.ids)), (*self.said.media, *spans))

    def check(self, temperature: float = 0.8) -> None:
        """Every log-prob is that of one full forward pass, of plain transformers where it can read the tokens."""
        shown = [place for span in self.said.media for place in range(span.start, span.end)]
        if IMAGE in np.delete(self.said.ids, shown):  # which plain transformers would take for an image
            found = logits(VisionModel(build(self.kind)), self.said)
        else:
            found = plain_logits(self.kind, build(self.kind), self.said)
        logp = torch.log_softmax(found / temperature, -1)[np.array(self.written) - 1]
        expected = logp.gather(1, torch.from_numpy(self.said.ids[self.written])[:, None])[:, 0]
        np.testing.assert_allclose(self.logprobs, expected.numpy(), atol=2e-3)


def opening(kind: str, name: str = "a", seed: int = 1) -> Conversation:
    return Conversation(kind, name, shown(kind, seed, 5, (16, 16), 4))


async def three_tool_images(sampler: InProcessSampler, talk: Conversation) -> None:
    talk.hear(await sampler.generate(talk.request()))
    for turn, size in enumerate([(32, 16), (20, 40), (16, 16)]):
        talk.tool(10 + turn, 2, size, 3)
        talk.hear(await sampler.generate(talk.request()))


def served(sampler: InProcessSampler, work: Callable[[InProcessSampler], Awaitable[None]]) -> None:
    async def whole() -> None:
        try:
            await work(sampler)
        finally:
            await sampler.close()

    asyncio.run(whole())


@pytest.mark.parametrize("kind", KINDS)
def test_turns_with_three_tool_images_are_one_full_forward_pass(
    kind: str, opened: Callable[[PolicyModel], InProcessSampler]
) -> None:
    model = VisionModel(build(kind))
    sampler = opened(model)
    assert sampler.capabilities.media

    async def work(sampler: InProcessSampler) -> None:
        talk = opening(kind)
        await three_tool_images(sampler, talk)
        talk.check()
        assert len(talk.said.media) == 4 and len(talk.logprobs) >= 20
        assert sampler._batcher._model.encoded_images == 4, (
            "an image is looked at once in a conversation, not once a turn"
        )

    served(sampler, work)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "smolvlm"])
def test_image_tokens_of_the_policy_s_are_tokens(kind: str, opened: Callable[[PolicyModel], InProcessSampler]) -> None:
    async def work(sampler: InProcessSampler) -> None:
        talk = opening(kind)
        talk.said = Shown(np.append(talk.said.ids, [IMAGE, IMAGE, 9]), talk.said.media)
        await three_tool_images(sampler, talk)
        talk.check()
        assert sampler._batcher._model.encoded_images == 4

    served(opened(VisionModel(build(kind))), work)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "smolvlm"])
def test_others_in_the_batch_change_nothing(kind: str, opened: Callable[[PolicyModel], InProcessSampler]) -> None:
    async def work(sampler: InProcessSampler) -> None:
        talks = [opening(kind, name, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
        text = Conversation(kind, "text", shown(kind, 9, 12))

        async def only_text() -> None:
            for _ in range(4):
                text.hear(await sampler.generate(text.request()))
                text.tool(3, 4)

        await asyncio.gather(*(three_tool_images(sampler, talk) for talk in talks), only_text())
        for talk in (*talks, text):
            talk.check()
        # The first image of a and b is one, and the tool images are the same in all.
        assert sampler._batcher._model.encoded_images == 5

    served(opened(VisionModel(build(kind))), work)


def test_prompts_with_other_images_share_nothing_behind_them(
    opened: Callable[[PolicyModel], InProcessSampler],
) -> None:
    kind = "qwen3_vl"
    text = np.random.default_rng(0).integers(3, 40, 3 * PREFIX_BLOCK)

    def asking(seed: int, name: str) -> Conversation:
        media = prepared(kind, seed)
        at = PREFIX_BLOCK + 5
        ids = np.concatenate((text[:at], media.token_ids, text[at:]))
        return Conversation(kind, name, Shown(ids, (MediaSpan(media, at),)))

    hashes = [block_hashes(one.said.ids, one.said.media) for one in (asking(1, "a"), asking(2, "b"))]
    assert hashes[0][0] == hashes[1][0] and not set(hashes[0][1:]) & set(hashes[1])

    async def work(sampler: InProcessSampler) -> None:
        talks = [asking(1, "a"), asking(2, "b"), asking(1, "c")]
        for talk in talks:
            talk.hear(await sampler.generate(talk.request()))
            talk.check()
        blocks = (len(talks[0].said.ids) - 7) // PREFIX_BLOCK
        assert sampler.stats.reused_tokens == PREFIX_BLOCK * (1 + blocks)
        assert sampler._batcher._model.encoded_images == 2

    served(opened(VisionModel(build(kind))), work)


@pytest.mark.parametrize("kind", ["qwen3_vl", "llava_next"])
def test_a_prompt_may_be_cut_in_the_middle_of_an_image(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "PREFILL_TOKENS", 7)

    async def work(sampler: InProcessSampler) -> None:
        talk = opening(kind)
        await three_tool_images(sampler, talk)
        talk.check()
        assert sampler._batcher._model.encoded_images == 4

    served(on_cpu(VisionModel(build(kind))), work)


def test_new_weights_and_sleep_in_the_middle_of_turns(opened: Callable[[PolicyModel], InProcessSampler]) -> None:
    kind = "qwen3_vl"
    model = VisionModel(build(kind))
    same = {name: tensor.clone() for name, tensor in model.weights()}

    async def work(sampler: InProcessSampler) -> None:
        talks = [opening(kind, name, seed) for name, seed in (("a", 1), ("b", 2))]
        talks[1].tool(5, (32, 32), 3)
        long = replace(PARAMS, max_tokens=40)
        writing = [asyncio.ensure_future(sampler.generate(talk.request(long))) for talk in talks]
        for version in (1, 2, 3):
            await sampler.publish(FullWeights(model.weight_shapes(), iter(same.items())), version)
            await sampler.sleep()
            await sampler.wake()
        for talk, answer in zip(talks, writing, strict=True):
            talk.hear(await answer)
            talk.check()
            talk.tool(7, 2, (16, 16), 2)
            talk.hear(await sampler.generate(talk.request()))
            talk.check()
        assert sampler._batcher._model.encoded_images == 4, "the tower did not change"

    served(opened(model), work)


def test_a_tower_with_other_weights_looks_anew(opened: Callable[[PolicyModel], InProcessSampler]) -> None:
    kind = "smolvlm"
    model = VisionModel(build(kind))
    tower = {name.removeprefix("model.") for name, _ in model.vision_parameters()}
    other = {name: tensor + 0.3 if name in tower else tensor for name, tensor in model.weights()}
    assert any(name in tower for name in other)

    async def work(sampler: InProcessSampler) -> None:
        talk = opening(kind)
        greedy = replace(PARAMS, temperature=0.0)
        before = await sampler.generate(talk.request(greedy))
        await sampler.release("a")
        await sampler.publish(FullWeights(model.weight_shapes(), iter(list(other.items()))), 1)
        after = await sampler.generate(talk.request(greedy))
        assert sampler._batcher._model.encoded_images == 2
        assert before.logprobs.tolist() != after.logprobs.tolist()

    served(opened(model), work)


def test_what_cannot_be_looked_at_is_refused_and_others_go_on(
    opened: Callable[[PolicyModel], InProcessSampler],
) -> None:
    kind = "qwen3_vl"

    async def work(sampler: InProcessSampler) -> None:
        good = opening(kind)
        span = good.said.media[0]
        broken = Media("broken", b"", span.media.token_ids, span.media.takes, {"pixel_values": np.zeros(3)})
        bad = Conversation(kind, "bad", Shown(good.said.ids, (MediaSpan(broken, span.start),)))
        moved = Conversation(kind, "moved", Shown(good.said.ids, (span.shifted(1),)))
        with pytest.raises(EngineError, match="are not those of image"):
            await sampler.generate(moved.request())
        answers = await asyncio.gather(
            sampler.generate(bad.request()), sampler.generate(good.request()), return_exceptions=True
        )
        assert isinstance(answers[0], EngineError) and "cannot read image broken" in str(answers[0])
        assert isinstance(answers[1], Completion)
        good.hear(answers[1])
        good.check()
        swapped = MediaSpan(prepared(kind, 77), span.start)
        good.said = Shown(np.append(good.said.ids, 5), (swapped,))
        with pytest.raises(EngineError, match="changed earlier tokens"):
            await sampler.generate(good.request())
        with pytest.raises(EngineError, match="cannot read image broken"):
            await sampler.generate(bad.request())

    served(opened(VisionModel(build(kind))), work)


def test_a_model_that_reads_text_refuses_images(opened: Callable[[PolicyModel], InProcessSampler]) -> None:
    async def work(sampler: InProcessSampler) -> None:
        assert not sampler.capabilities.media
        with pytest.raises(EngineError, match="reads text only"):
            await sampler.generate(opening("qwen3_vl").request())

    served(opened(TransformersModel(build_text("qwen3"))), work)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_images_of_prompts_that_wait_are_encoded_together_for_a_gpu(device: str) -> None:
    kind = "qwen3_vl"
    model = VisionModel(build(kind))
    model.together = True  # as on a GPU

    async def work(sampler: InProcessSampler) -> None:
        for first in (0, 4):  # the first four are tried one by one too
            looked = sampler._batcher._model
            before = looked.tower_calls
            talks = [opening(kind, f"talk {first + number}", 50 + first + number) for number in range(4)]
            waiting = [sampler.generate(talk.request()) for talk in talks]
            for talk, answer in zip(talks, await asyncio.gather(*waiting), strict=True):
                talk.hear(answer)
                talk.check()
            assert looked.encoded_images == first + 4
        assert looked.tower_calls - before < 4

    served(paged(device)(model), work)


def test_an_image_that_cannot_be_read_ends_its_own_turn_alone(
    opened: Callable[[PolicyModel], InProcessSampler],
) -> None:
    kind = "qwen3_vl"
    model = VisionModel(build(kind))
    model.together = True

    async def work(sampler: InProcessSampler) -> None:
        talks = [opening(kind, str(number), 70 + number) for number in range(3)]
        (span,) = talks[1].said.media
        arrays = {name: array[:0] for name, array in span.media.arrays.items()}
        broken = MediaSpan(replace(span.media, digest="broken", arrays=arrays), span.start)
        talks[1].said = Shown(talks[1].said.ids, (broken,))
        waiting = [sampler.generate(talk.request()) for talk in talks]
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(answers[1], EngineError) and "image broken" in str(answers[1])
        for talk, answer in ((talks[0], answers[0]), (talks[2], answers[2])):
            assert isinstance(answer, Completion)
            talk.hear(answer)
            talk.check()

    served(opened(model), work)
