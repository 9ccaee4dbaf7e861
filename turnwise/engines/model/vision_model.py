"""A vision-language model of transformers as a policy model: its own tower and projector, our attention in its decoder.

An image's features do not depend on what else is in a pass (on a GPU to rounding, see `image_batches.py`), and they
take the place of tokens by where the image stands, never by a token's number: an image token that the policy writes is
a token.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PreTrainedModel

from turnwise.engines.model.attention import packed
from turnwise.engines.model.image_batches import ImageBatches, joined_arrays
from turnwise.engines.model.image_features import FeatureCache
from turnwise.engines.model.policy_model import Features, ImageFeatures
from turnwise.engines.model.recurrence import Recurrence
from turnwise.engines.model.transformers.model import TransformersModel
from turnwise.engines.model.transformers.probe import alike, under
from turnwise.engines.model.transformers.weights import CheckpointNames
from turnwise.errors import EngineError, one_line
from turnwise.ledger import Media, MediaSpan

DECODERS = ("language_model", "text_model")
"""What families call the part that reads tokens."""
TYPES = ("mm_token_type_ids", "token_type_ids")
"""What families call the array that tells an image's tokens from text."""
BEFORE, BEHIND = 3, 4
"""Tokens around the first image that a model is held against itself with."""


class VisionModel(TransformersModel):
    """A policy model that sees; tower and projector are frozen until `train_vision`.

    The first image that comes is also run through the model's own code, and a family that makes something else of it
    (an image whose tokens see each other, say) is refused; text it reads all the same.
    """

    reads_images = True
    vision_trained: bool
    """Whether tower and projector are; what is trained is run anew every time."""
    together: bool | None = None
    """Whether several images go through the tower in one call; None where it is on a GPU: on the CPU every bit of an
    image's features is the same in any company."""
    proven: bool
    """Whether it was found to do with an image what its own code does."""
    _kept: FeatureCache
    _family = AutoModelForImageTextToText
    _attention: ClassVar[Mapping[str, str]] = {}
    """The tower keeps its own; the decoder gets ours when it is probed."""

    def __init__(self, model: PreTrainedModel, names: CheckpointNames | None = None) -> None:
        base = model.base_model
        if not hasattr(base, "get_image_features") or not any(hasattr(base, name) for name in DECODERS):
            raise EngineError(f"{type(model).__name__} takes images in a way of its own, which Turnwise does not know")
        super().__init__(model, names)
        self._deep = "deepstack_visual_embeds" in self._takes
        self._placed: WeakKeyDictionary[Media, NDArray[np.int64]] = WeakKeyDictionary()
        self._batches = ImageBatches()
        self.proven = False
        self.encoded_images = self.tower_calls = 0
        self.train_vision(False)

    def _take_over(self, other: TransformersModel) -> None:
        super()._take_over(other)
        assert isinstance(other, VisionModel)
        self._deep, self._kept, self._placed = other._deep, other._kept, other._placed
        self._batches, self.together = other._batches, other.together
        self.proven, self.encoded_images, self.tower_calls = other.proven, 0, 0
        self.vision_trained = other.vision_trained

    @property
    def _decoder(self) -> PreTrainedModel:
        base = self.model.base_model
        decoder: PreTrainedModel = next(getattr(base, name) for name in DECODERS if hasattr(base, name))
        return decoder

    def vision_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Of tower and projector, by their names here."""
        read = {*self._decoder.parameters(), *self._head.parameters(), *self.model.get_input_embeddings().parameters()}
        return ((name, parameter) for name, parameter in self.named_parameters() if parameter not in read)

    def train_vision(self, trained: bool) -> None:
        """Train tower and projector, or freeze them."""
        self.vision_trained, self._kept = trained, FeatureCache()
        for _, parameter in self.vision_parameters():
            parameter.requires_grad_(trained)

    def with_lora(self, *, rank: int, alpha: float, seed: int) -> TransformersModel:
        from turnwise.engines.model.peft_adapter import PeftVisionModel  # peft is an extra

        if self.vision_trained:
            raise EngineError("with an adapter tower and projector stay frozen: set learner.train_vision=false")
        return PeftVisionModel(self, rank=rank, alpha=alpha, seed=seed)

    # --- images ---------------------------------------------------------------------------------------------------

    def encode_images(self, media: Sequence[Media]) -> list[Features]:
        """The features of each image, kept for later passes while the tower is frozen."""
        once = {image.digest: image for image in media}  # siblings of a group show the same
        if self.vision_trained:
            features_of = {image.digest: features for image, features in self._encode([*once.values()])}
            return [features_of[image.digest] for image in media]
        form = str(self.model.get_input_embeddings().weight.dtype)  # a copy in another makes other features
        features_of = {digest: kept for digest in once if (kept := self._kept.get(f"{digest} {form}")) is not None}
        missing = [image for digest, image in once.items() if digest not in features_of]
        if missing:
            with self._plainly():
                for image, features in self._encode(missing):
                    features_of[image.digest] = features
                    self._kept.put(f"{image.digest} {form}", features)
        return [features_of[image.digest] for image in media]

    @contextmanager
    def _plainly(self) -> Iterator[None]:
        """In the weights' own format, whoever asks, and not as tensors of inference: a copy of this model may take what
        is found into passes with gradient."""
        device = self.model.get_input_embeddings().weight.device.type
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(device, enabled=False):
            yield

    def _encode(self, media: Sequence[Media]) -> Iterator[tuple[Media, Features]]:
        """Each image with its features."""
        if not self.proven and media:
            with self._plainly():
                self._prove(media[0], self._features(media[:1])[0])
            self.proven = True
        if self.joins_images:
            encoded = self._batches.encode(media, self._features)
        else:
            encoded = ((image, self._features([image])[0]) for image in media)
        for image, features in encoded:
            self.encoded_images += 1
            yield image, features

    @property
    def joins_images(self) -> bool:
        """Whether it computes features of several images in one call."""
        return self.model.get_input_embeddings().weight.device.type != "cpu" if self.together is None else self.together

    @contextmanager
    def _theirs(self, media: Sequence[Media]) -> Iterator[None]:
        """Around code of others, given what a processor made of images."""
        try:
            yield
        except (TypeError, ValueError, RuntimeError, AttributeError, LookupError, StopIteration) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            why, which = one_line(error)[:200], _named(media)
            raise EngineError(f"{type(self.model).__name__} cannot read {which}: {why}") from error

    def _features(self, media: Sequence[Media]) -> list[Features]:
        """The features of these images, from one call of the tower."""
        self.tower_calls += 1
        with self._theirs(media):
            outputs = self.model.base_model.get_image_features(**self._arrays(media))
            rows = _joined(outputs.pooler_output)
            deep = tuple(_joined(part) for part in getattr(outputs, "deepstack_features", None) or ())
        wanted = [image.features for image in media]
        if any(len(part) != sum(wanted) for part in (rows, *deep)):
            name, which = type(self.model).__name__, _named(media)
            raise EngineError(f"{name} makes {len(rows)} features of {which}, which has {sum(wanted)} tokens")
        of_images = zip(*(torch.split(part, wanted) for part in (rows, *(deep if self._deep else ()))), strict=True)
        if len(media) == 1 or rows.requires_grad:
            return [Features(own, tuple(rest)) for own, *rest in of_images]
        # Copies: an image that is forgotten must not be kept in memory by the others.
        return [Features(own.clone(), tuple(part.clone() for part in rest)) for own, *rest in of_images]

    def _arrays(self, media: Sequence[Media]) -> dict[str, Tensor]:
        return joined_arrays(media, self.model.get_input_embeddings().weight.device)

    def _entering(self, tokens: Tensor, images: ImageFeatures | None) -> dict[str, Any]:
        if images is None:
            return super()._entering(tokens, None)
        states = self.model.get_input_embeddings()(tokens)
        embedded: dict[str, Any] = {
            "inputs_embeds": states.index_copy(0, images.places, images.rows.to(states.dtype)).unsqueeze(0)
        }
        if images.deep:
            mask = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
            embedded["visual_pos_masks"] = mask.index_fill(0, images.places, True).unsqueeze(0)
            embedded["deepstack_visual_embeds"] = [rows.to(states.dtype) for rows in images.deep]
        return embedded

    # --- positions ------------------------------------------------------------------------------------------------

    def positions(self, token_ids: NDArray[np.int64], media: Sequence[MediaSpan]) -> NDArray[np.int64]:
        """As promised: a family that places images in three axes is asked about one block at a time, so that no
        position depends on what comes later, and images may stand side by side."""
        if not media or not hasattr(self.model.base_model, "get_rope_index"):
            return np.arange(len(token_ids))
        parts: list[NDArray[np.int64]] = []
        at, position = 0, 0
        for span in media:
            parts.append(_text(position, span.start - at))
            position += span.start - at
            block = self._block_positions(span.media)
            parts.append(position + block)
            at, position = span.end, position + int(block.max()) + 1
        parts.append(_text(position, len(token_ids) - at))
        return np.concatenate(parts, axis=1)

    def _block_positions(self, media: Media) -> NDArray[np.int64]:
        """The positions [3, n] of an image's tokens, counted from 0."""
        block = self._placed.get(media)
        if block is None:
            grids = {name: array for name, array in media.arrays.items() if name.endswith("grid_thw")}
            with self._theirs([media]):
                placed, _ = self.model.base_model.get_rope_index(
                    torch.tensor(media.token_ids)[None],
                    mm_token_type_ids=torch.tensor(media.takes, dtype=torch.int64)[None],
                    **{name: torch.tensor(array) for name, array in grids.items()},
                )
            block = self._placed[media] = placed[:, 0].numpy()
        return block

    # --- held against the model's own code ------------------------------------------------------------------------

    def _prove(self, media: Media, features: Features) -> None:
        """EngineError unless the model itself gives the logits that we give, with this image among a few tokens."""
        ids, span = _around(media, self.shape.vocab_size)
        device = self.model.get_input_embeddings().weight.device
        tokens, places = (torch.from_numpy(x).to(device) for x in (ids, self.positions(ids, [span])))
        takes = torch.from_numpy(span.start + np.flatnonzero(media.takes)).to(device)
        images = ImageFeatures(takes, features.rows, features.deep)
        ours = self.logits(self._base(tokens, places, packed([len(ids)], device), Recurrence((len(ids),)), images))
        types = torch.zeros_like(tokens).index_fill(0, takes, 1)
        named = inspect.signature(self.model.base_model.forward).parameters
        options = {name: types[None] for name in TYPES if name in named}
        with self._theirs([media]), under(self._decoder, "eager"):
            theirs = self.model(input_ids=tokens[None], use_cache=False, **self._arrays([media]), **options).logits[0]
        if not alike(ours.to(self.dtype), theirs.to(self.dtype)):
            raise EngineError(
                f"{type(self.model).__name__} uses images in ways that Turnwise does not (image tokens may attend to "
                "each other), so its logits differ and it gets no images"
            )

    # --- weights --------------------------------------------------------------------------------------------------

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        vision = {name.removeprefix("model.") for name, _ in self.vision_parameters()}
        if self._names.inward(self._tensors(), weights, vision):
            self._kept = FeatureCache()  # copies of this model may go on with theirs


def _named(media: Sequence[Media]) -> str:
    return f"image {media[0].digest}" if len(media) == 1 else f"{len(media)} images at once"


def _joined(output: Any) -> Tensor:
    """The rows of all images, which families give as one tensor or in parts."""
    rows = torch.cat(
        [part.reshape(-1, part.shape[-1]) for part in ([output] if isinstance(output, Tensor) else output)]
    )
    return rows


def _text(start: int, count: int) -> NDArray[np.int64]:
    return np.broadcast_to(np.arange(start, start + count), (3, count))


def _around(media: Media, vocabulary: int) -> tuple[NDArray[np.int64], MediaSpan]:
    """The image between a few tokens that are none of its own."""
    free = np.setdiff1d(np.arange(min(vocabulary, len(media.token_ids) + 64)), media.token_ids)
    drawn = np.random.default_rng(0).choice(free, BEFORE + BEHIND)
    return np.concatenate((drawn[:BEFORE], media.token_ids, drawn[BEFORE:])), MediaSpan(media, BEFORE)
