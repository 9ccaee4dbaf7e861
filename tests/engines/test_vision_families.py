"""Many families from their folders: images as their own processor and model have them, in turns, packed, learned from."""

import asyncio
import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import vision_processors as made
from batches import batch_of
from PIL import Image
from seeing import Shown, logits
from transformers import PreTrainedModel
from vision_families import SEEING, Family, build, write

from turnwise.chat.images.pixels import unpack
from turnwise.chat.images.processor import ImageProcessor, find_image_processor
from turnwise.chat.tokenizer import Tokenizer
from turnwise.config import LearnerConfig
from turnwise.config.choices import ModelImplementation
from turnwise.engines.learners.learner import Objective, TokenBatch, Who
from turnwise.engines.learners.local import LocalLearner
from turnwise.engines.model.attention import Regime
from turnwise.engines.model.loading import add_lora, choose_implementation, model_facts
from turnwise.engines.model.policy_model import PolicyModel
from turnwise.engines.model.sources import ModelSource
from turnwise.engines.model.vision_model import VisionModel
from turnwise.engines.samplers.cpu.torch_cpu import TorchSampler
from turnwise.engines.samplers.gpu.cuda import CudaSampler
from turnwise.engines.samplers.gpu.steps import page_bytes
from turnwise.engines.samplers.in_process import InProcessSampler
from turnwise.engines.samplers.request import NoiseKey, Request, SamplingParams
from turnwise.errors import DataError
from turnwise.ledger import MediaSpan

TEMPERATURE = 0.8


@dataclass(frozen=True)
class Opened:
    """A family's folder, read by us and by transformers."""

    family: Family
    folder: Path
    images: ImageProcessor
    model: VisionModel
    plain: PreTrainedModel

    def shown(self, *parts: str | bytes) -> Shown:
        """Words and encoded images by turns."""
        ids: list[int] = []
        spans: list[MediaSpan] = []
        for part in parts:
            if isinstance(part, bytes):
                spans.append(MediaSpan(self.images.prepare(part), len(ids)))
                ids += spans[-1].media.token_ids.tolist()
            else:
                ids += self.images._tokenizer.encode(part, after="").ids
        return Shown(np.array(ids, np.int64), tuple(spans))

    @torch.no_grad()
    def plain_logits(self, said: Shown) -> torch.Tensor:
        """What the family's processor makes of all images at once, through its own model."""
        pictures = [unpack(span.media.content, None).picture for span in said.media]
        marks = self.images.image_token * len(pictures)
        given = dict(self.images._processor(images=pictures, text=[marks], return_tensors="pt"))
        ids = torch.from_numpy(said.ids)[None]
        types = torch.from_numpy(np.isin(said.ids, self.images._feature_ids))[None].long()
        own = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": types}
        given |= {name: value for name, value in own.items() if name in given or name == "input_ids"}
        return self.plain(**given, use_cache=False).logits[0].float()


@pytest.fixture(scope="module", params=SEEING)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    family = SEEING[request.param]
    folder = write(family, tmp_path_factory.mktemp("family"))
    plain = build(family)
    plain.save_pretrained(folder)
    images = find_image_processor(folder, Tokenizer(folder), None)
    model = VisionModel.read(folder)
    assert images is not None and isinstance(model, VisionModel)
    return Opened(family, folder, images, model, plain)


def png(seed: int, width: int, height: int, mode: str = "RGB") -> bytes:
    return made.encoded(made.picture(width, height, seed, mode))


def test_the_folder_s_processor_and_model_agree_and_packed_is_single(opened: Opened) -> None:
    said = opened.shown("see ", png(1, 16, 16), "or", png(2, 32, 16), ".", png(3, 20, 40), " what?")
    found = logits(opened.model, said)
    torch.testing.assert_close(found, opened.plain_logits(said), atol=1e-3, rtol=1e-3)
    others = [opened.shown("words alone"), opened.shown(png(4, 32, 32), "so")]
    alone = torch.cat([found, *(logits(opened.model, one) for one in others)])
    torch.testing.assert_close(logits(opened.model, said, *others), alone, atol=1e-4, rtol=1e-4)


def test_the_plan_knows_how_much_is_for_seeing(opened: Opened) -> None:
    source = ModelSource("tiny", opened.folder)
    choice = choose_implementation(source, ModelImplementation.auto)
    facts = model_facts(source, choice)
    assert choice.implementation is ModelImplementation.transformers
    assert facts.vision == sum(parameter.numel() for _, parameter in opened.model.vision_parameters())


def test_strange_pictures_are_seen_as_the_family_sees_them_or_refused(opened: Opened) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    frames = [made.picture(20, 20, seed) for seed in range(2)]
    wide = Image.fromarray(np.asarray(made.picture(24, 18, mode="L")).astype(np.uint16) * 256)
    pictures = {
        "gray": png(1, 24, 18, "L"), "clear": png(2, 24, 18, "RGBA"), "one bit": png(3, 24, 18, "1"),
        "palette": made.encoded(made.picture(24, 18, mode="P"), "gif"), "sixteen bits": made.encoded(wide),
        "cmyk": made.encoded(made.picture(24, 18, mode="CMYK"), "jpeg"),
        "turned": made.encoded(made.picture(40, 20), "jpeg", exif=turned),
        "moving": made.encoded(frames[0], "gif", save_all=True, append_images=frames[1:]),
        "dot": png(4, 1, 1), "line": png(5, 1, 150), "lying": png(6, 150, 1), "thread": png(7, 1, 400),
    }  # fmt: skip
    seen = []
    for name, content in pictures.items():
        try:
            opened.images.prepare(content)
        except DataError as error:
            assert name == "thread" and "takes no image of 1x400 pixels" in str(error), (name, error)
            with pytest.raises(DataError, match="takes no image"):
                opened.images.measure(io.BytesIO(content))
            continue
        seen.append(content)
        media, counted = opened.images.prepare(content), opened.images.measure(io.BytesIO(content))
        assert media.token_ids.tolist() == counted.token_ids.tolist(), name
    # Each by itself: a family's own code may need all images of a pass in one shape.
    for content in seen:
        said = opened.shown("a", content, "b")
        torch.testing.assert_close(logits(opened.model, said), opened.plain_logits(said), atol=1e-3, rtol=1e-3)


def on_cpu(model: PolicyModel) -> InProcessSampler:
    return TorchSampler(model, decode=str, max_batch=4, threads=1, regime=Regime(1, 2, 32))


def paged(model: PolicyModel) -> InProcessSampler:
    """The GPU's, by the references of its kernels."""
    size, place = 100 * page_bytes(model.shape.caches, torch.float32), torch.device("cpu")
    return CudaSampler(
        model, device=place, decode=str, max_batch=4, cache_bytes=size, invariant=False, steps_per_run=3,
        prefill_tokens=64,
    )  # fmt: skip


@pytest.mark.parametrize("make", [on_cpu, paged])
def test_turns_with_three_tool_images_are_one_full_pass(
    opened: Opened, make: Callable[[PolicyModel], InProcessSampler]
) -> None:
    said, written, logprobs = opened.shown("see ", png(1, 16, 16), "?"), [], []

    async def work() -> None:
        nonlocal said
        sampler = make(opened.model)
        try:
            for turn, size in enumerate([(32, 16), (20, 40), (16, 16), None]):
                params, noise = SamplingParams(max_tokens=5, temperature=TEMPERATURE), NoiseKey(1, 0, "a", turn)
                answer = await sampler.generate(Request("a", said.ids, params, noise, said.media))
                written.extend(range(len(said.ids), len(said.ids) + len(answer.token_ids)))
                logprobs.extend(answer.logprobs.tolist())
                more = opened.shown("tool:", png(10 + turn, *size), "!") if size else opened.shown("")
                ids = np.concatenate((said.ids, answer.token_ids, more.ids))
                shift = len(said.ids) + len(answer.token_ids)
                said = Shown(ids, (*said.media, *(span.shifted(shift) for span in more.media)))
        finally:
            await sampler.close()

    asyncio.run(work())
    images = {place for span in said.media for place in range(span.start, span.end)}
    spelled = [place for place in np.flatnonzero(np.isin(said.ids, opened.images._feature_ids)) if place not in images]
    # Plain transformers would take an image token that the policy wrote for an image.
    found = logits(opened.model, said) if spelled else opened.plain_logits(said)
    logp = torch.log_softmax(found / TEMPERATURE, -1)[np.array(written) - 1]
    expected = logp.gather(1, torch.from_numpy(said.ids[written])[:, None])[:, 0]
    assert len(said.media) == 4 and len(written) == 20
    np.testing.assert_allclose(logprobs, expected.numpy(), atol=2e-3)


def batch(sequences: list[Shown], **arrays: object) -> TokenBatch:
    """The last four tokens of each are the policy's."""
    lengths = [len(one.ids) for one in sequences]
    ends = np.cumsum(lengths)
    index = np.concatenate([np.arange(end - 4, end) for end in ends])
    made = batch_of(
        torch.from_numpy(np.concatenate([s.ids for s in sequences])), lengths, torch.from_numpy(index), **arrays
    )
    starts = (ends - lengths).tolist()
    spans = [span.shifted(start) for one, start in zip(sequences, starts, strict=True) for span in one.media]
    return replace(made, media=tuple(spans))


def test_a_step_of_grpo_changes_the_language_model_and_not_the_tower(opened: Opened) -> None:
    sequences = [opened.shown("see ", png(1, 16, 16), "or", png(2, 20, 40), "? four"), opened.shown("words alone")]
    model = VisionModel(opened.plain)
    learner = LocalLearner(model, LearnerConfig(lr=1e-3), temperature=TEMPERATURE)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    start = learner.score(batch(sequences), Who.POLICY)
    advantages = np.repeat([1.0, -1.0], 4)
    given = batch(sequences, advantages=advantages, old_logprobs=start)
    try:
        step = learner.update([given], Objective("ppo_clip"))
        assert np.isfinite(step.metrics["grad_norm"]) and step.metrics["grad_norm"] > 0
        assert ((learner.score(given, Who.POLICY) - start) * advantages).sum() > 0
        moved = {name for name, p in model.named_parameters() if not torch.equal(before[name], p)}
        tower = {name for name, _ in model.vision_parameters()}
        assert moved and tower and not moved & tower
    finally:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(before[name])


def test_an_adapter_is_on_the_decoder_alone_and_goes_out_merged(opened: Opened) -> None:
    said = opened.shown("see ", png(1, 16, 16), "?")
    adapted = add_lora(VisionModel(build(opened.family)), 2, 4.0, 5)
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    tower = {name for name, _ in opened.model.vision_parameters()}
    assert trained and not {name.split(".lora_")[0] + ".weight" for name in trained} & tower
    with torch.no_grad():
        for parameter in trained.values():
            parameter.add_(0.05)
    found = logits(adapted, said)
    assert not torch.allclose(found, logits(opened.model, said), atol=1e-3)
    assert dict(adapted.weight_shapes()) == {name: tuple(tensor.shape) for name, tensor in opened.model.weights()}
    merged = VisionModel(build(opened.family))
    merged.load(adapted.weights())
    torch.testing.assert_close(logits(merged, said), found, atol=1e-3, rtol=1e-3)
