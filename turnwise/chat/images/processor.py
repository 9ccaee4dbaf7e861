"""Images through the model's own Hugging Face processor: the arrays its vision tower takes, and its block of tokens."""

import json
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from turnwise.chat.control_tokens import shared
from turnwise.chat.images.pixels import shown_size, unpack
from turnwise.chat.tokenizer import Encoding, Tokenizer
from turnwise.errors import DataError, TemplateError, one_line
from turnwise.ledger import Media
from turnwise.system.image_bytes import digest_of, recorded

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
KEPT_BYTES = 256 << 20
"""Of arrays that nobody may ask for again; those of an older image are made anew from its bytes."""
MOST_SIZES = 1024
"""Sizes of images whose block is kept: photographs come in tens of thousands, and a block has thousands of tokens."""
_OF_THE_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


class NotShown(TemplateError):
    """An image processor that is whole, and with which images have no place in a conversation here. Its model reads
    text all the same."""


def find_image_processor(folder: Path, tokenizer: Tokenizer, max_pixels: int | None) -> "ImageProcessor | None":
    """The image processor of a model's folder; None for a model that reads text only.

    NotShown for one that does not fit a conversation, TemplateError for one that is broken.
    """
    if not any((folder / name).is_file() for name in PROCESSOR_FILES):
        return None
    from transformers.utils import is_torchvision_available

    try:
        kind = _processor_class(folder)
        if kind is None:
            return None
        if lacking := getattr(kind, "_backends", None):  # what the library has in the place of a class it cannot import
            raise NotShown(f"its processor needs {' and '.join(lacking)}, which is not installed")
        if "image_processor" not in kind.get_attributes():
            return None
        processor = _open(kind, folder, tokenizer)
        return ImageProcessor(processor, tokenizer, max_pixels, feature_id=_feature_id(folder))
    except (TemplateError, DataError):
        raise
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TemplateError(f"{folder}: its image processor cannot be read: {one_line(error)[:300]}") from error
    except Exception as error:  # the library's code for this family, which may want more than there is here
        if "torchvision" in str(error) and not is_torchvision_available():
            raise NotShown("its processor needs torchvision, which is not installed") from error
        raise NotShown(f"its processor cannot be made: {one_line(error)[:300]}") from error


class ImageProcessor:
    """One model's processor, from any thread. An image that is alive is prepared once, whoever asks for it."""

    def __init__(
        self, processor: Any, tokenizer: Tokenizer, max_pixels: int | None, *, feature_id: int | None = None
    ) -> None:
        """`feature_id` is the token that the model replaces by features, where its config names one."""
        self._processor = processor
        self._tokenizer = tokenizer
        self._max_pixels = max_pixels
        self._lock = threading.Lock()
        self._alive: weakref.WeakValueDictionary[str, Media] = weakref.WeakValueDictionary()
        """By the digest of what was given, and of what is shown where that is not the same."""
        self._under_way: dict[str, Future[Media]] = {}
        self._arrays: OrderedDict[str, dict[str, NDArray[Any]]] = OrderedDict()
        self._arrays_bytes = 0
        self._blocks: dict[tuple[int, int], NDArray[np.int64]] = {}
        """By the size of an image, as far as anybody measured one."""
        self._feature_ids = [self._find_feature_id() if feature_id is None else feature_id]
        self.image_token, blank = self._find_marker()
        """What a chat template writes where an image goes; the block stands in its place."""
        self.image_token_id = tokenizer.added_ids[self.image_token]
        self.blank = recorded("blank", blank)
        """A small image, for trying a template out."""
        texts = {number: text for text, number in tokenizer.added_ids.items()}
        self.tokens = frozenset(texts[token] for token in {*blank.tolist(), *self._feature_ids} if token in texts)
        """Control tokens that show images: nobody's words may spell them."""

    def prepare(self, content: bytes) -> Media:
        """What the model takes of one encoded image. DataError says why it cannot; slow, so not on the event loop."""
        key = digest_of(content)
        with self._lock:
            alive = self._alive.get(key)
            if alive is not None:
                return alive
            waiting = self._under_way.get(key)
            if waiting is None:
                promise = self._under_way[key] = Future[Media]()
        if waiting is not None:
            return waiting.result()
        try:
            media = self._prepare(content)
        except BaseException as error:
            promise.set_exception(error)
            raise
        else:
            promise.set_result(media)
            return media
        finally:
            with self._lock:
                del self._under_way[key]
                if promise.exception() is None:
                    self._alive[key] = promise.result()

    def _prepare(self, content: bytes) -> Media:
        image = unpack(content, self._max_pixels)
        digest = digest_of(image.content)
        with self._lock:
            alive = self._alive.get(digest)
        if alive is not None:
            return alive
        ids, arrays = self._process(image.picture, self.image_token)
        self._check_edges(ids)
        media = Media(digest, image.content, ids, np.isin(ids, self._feature_ids), _Arrays(self, digest, image.content))
        with self._lock:
            self._keep(digest, arrays)
            return self._alive.setdefault(digest, media)

    def adopt(self, media: Media) -> Media:
        """An image that the same model's processor prepared in another process, as one of this one's."""
        with self._lock:
            self._keep(media.digest, dict(media.arrays))
            arrays = _Arrays(self, media.digest, media.content)
            return self._alive.setdefault(media.digest, replace(media, arrays=arrays))

    def measure(self, file: BinaryIO) -> Media:
        """An image's block of tokens, for counting: only its head is read, and a blank one of its size is prepared."""
        size = shown_size(file, self._max_pixels)
        ids = self._blocks.get(size)
        if ids is None:
            import PIL.Image

            if len(self._blocks) >= MOST_SIZES:
                self._blocks.clear()
            ids = self._blocks[size] = self._process(PIL.Image.new("RGB", size), self.image_token)[0]
        return recorded(f"{size[0]}x{size[1]}", ids)

    def arrays_of(self, digest: str, content: bytes) -> dict[str, NDArray[Any]]:
        """The arrays of an image that was prepared, made anew where they were not kept."""
        with self._lock:
            cached = self._arrays.get(digest)
            if cached is not None:
                self._arrays.move_to_end(digest)
                return cached
        arrays = self._process(unpack(content, None).picture, self.image_token)[1]
        with self._lock:
            self._keep(digest, arrays)
        return arrays

    def _keep(self, digest: str, arrays: dict[str, NDArray[Any]]) -> None:
        if digest in self._arrays:
            return
        self._arrays[digest] = arrays
        self._arrays_bytes += _bytes_of(arrays)
        while self._arrays_bytes > KEPT_BYTES and len(self._arrays) > 1:
            self._arrays_bytes -= _bytes_of(self._arrays.popitem(last=False)[1])

    def _process(self, picture: "Picture", marker: str) -> tuple[NDArray[np.int64], dict[str, NDArray[Any]]]:
        """(the block of tokens, the arrays): the processor expands a text that is nothing but its own image token."""
        ids, outputs = self._call([picture], marker)
        arrays = {name: np.asarray(value) for name, value in outputs.items() if name not in _OF_THE_TEXT}
        if not np.isin(ids, self._feature_ids).any() or not arrays:
            raise DataError(f"the model's image processor gives nothing for {picture.width}x{picture.height} pixels")
        for array in (ids, *arrays.values()):
            array.flags.writeable = False
        return ids, arrays

    def _call(self, pictures: list["Picture"], text: str) -> tuple[NDArray[np.int64], dict[str, Any]]:
        try:
            outputs = dict(self._processor(images=pictures, text=[text], return_tensors="np"))
        except Exception as error:  # the model's own code, on a stranger's image
            size = f"{pictures[0].width}x{pictures[0].height}"
            raise DataError(f"the model's processor takes no image of {size} pixels: {one_line(error)}") from error
        return np.asarray(outputs["input_ids"], np.int64).reshape(-1), outputs

    def _find_feature_id(self) -> int:
        token = getattr(self._processor, "image_token_id", None)
        if token is None:
            token = self._tokenizer.added_ids.get(getattr(self._processor, "image_token", None) or "")
        if not isinstance(token, int):
            raise NotShown("the model's image processor has no image token, so images cannot be put among the tokens")
        return token

    def _find_marker(self) -> tuple[str, NDArray[np.int64]]:
        """The token that the processor expands, and a block. Some expand the token before the image's own."""
        import PIL.Image

        blank, problem = PIL.Image.new("RGB", (64, 64), "white"), "it names none"
        for name in ("image_token", "boi_token"):
            marker = getattr(self._processor, name, None) or getattr(self._tokenizer.hf, name, None)
            if not isinstance(marker, str) or marker not in self._tokenizer.added_ids:
                continue
            try:
                ids = self._process(blank, marker)[0]
            except DataError as error:
                problem = str(error)
                continue
            self._check_edges(ids)
            self._check_among_words(blank, marker, ids)
            return marker, ids
        raise NotShown(f"the model's processor expands no image token: {problem}")

    def _check_edges(self, ids: NDArray[np.int64]) -> None:
        """Tokens at the edges that take nothing from their neighbours: text beside the block stays what it is."""
        hard = {self._tokenizer.added_ids[text] for text in self._tokenizer.hard_texts}
        if int(ids[0]) not in hard or int(ids[-1]) not in hard:
            block = self._tokenizer.decode(ids[:3].tolist()) + "..." + self._tokenizer.decode(ids[-3:].tolist())
            raise NotShown(f"the tokens of an image ({block!r}) could merge with the text beside them")

    def _check_among_words(self, blank: "Picture", marker: str, ids: NDArray[np.int64]) -> None:
        """The processor must write the same block wherever an image stands, and nothing beside it."""
        text = f"a{marker}b{marker}{marker}"
        try:
            written = self._call([blank] * 3, text)[0].tolist()
        except DataError as error:
            raise NotShown(f"the model's processor takes no text with several images: {error}") from error
        marked = self._tokenizer.added_ids[marker]
        expected: list[int] = []
        for token in self._tokenizer.encode(text, after="").ids:
            expected += ids.tolist() if token == marked else [token]
        if written != expected:
            at = shared(written, expected)
            became, stands = (self._tokenizer.decode(tokens[max(at - 1, 0) : at + 2]) for tokens in (written, expected))
            raise NotShown(
                f"its processor's tokens for an image depend on the text around it: for {text!r} it gives "
                f"{became!r} instead of {stands!r}"
            )


class _Arrays(Mapping[str, NDArray[Any]]):
    """The arrays of one image, kept for a while and made again when needed: they take a hundred times its file's bytes.

    Another process gets them as they are.
    """

    def __init__(self, processor: ImageProcessor, digest: str, content: bytes) -> None:
        self._processor, self._digest, self._content = processor, digest, content

    def _made(self) -> dict[str, NDArray[Any]]:
        return self._processor.arrays_of(self._digest, self._content)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._made()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made())

    def __len__(self) -> int:
        return len(self._made())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self._made()),)


class _PlainTokenizer:
    """The tokenizer as a processor calls it. The library's own sets options on a shared object, which breaks whoever
    encodes in another thread, and adds tokens that open a sequence."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer.hf, name)

    def __call__(self, text: list[str], **options: Any) -> "_Encoded":
        return _Encoded([self._tokenizer.encode(line, after="") for line in text])


class _Encoded(dict[str, Any]):
    """What a processor is given for its texts; some ask in which token a character stands."""

    def __init__(self, encodings: list[Encoding]) -> None:
        super().__init__(input_ids=[encoding.ids for encoding in encodings])
        self._offsets = [encoding.offsets for encoding in encodings]

    def char_to_token(self, text: int, character: int) -> int | None:
        """The token that a character of the text with this number belongs to; None when it has none."""
        return next((n for n, (start, end) in enumerate(self._offsets[text]) if start <= character < end), None)


def _processor_class(folder: Path) -> Any:
    """The class of the library that the folder's files name, else the one of the model's kind; None for none."""
    from transformers import AutoConfig
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING, processor_class_from_name

    for name in (*PROCESSOR_FILES, "tokenizer_config.json"):
        path = folder / name
        named = json.loads(path.read_text(encoding="utf-8")).get("processor_class") if path.is_file() else None
        if isinstance(named, str) and (kind := processor_class_from_name(named)) is not None:
            return kind
    if not (folder / "config.json").is_file():
        return None
    return PROCESSOR_MAPPING.get(type(AutoConfig.from_pretrained(folder, trust_remote_code=False)), None)


def _feature_id(folder: Path) -> int | None:
    """The token that the model's own code replaces by features. Processors of some families call another one their
    image token: the one that a template writes."""
    from transformers import CONFIG_MAPPING

    path = folder / "config.json"
    written = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    is_known = written.get("model_type") in CONFIG_MAPPING
    config = CONFIG_MAPPING[written["model_type"]].from_dict(written).to_dict() if is_known else written
    candidates = [config.get(name) for name in ("image_token_id", "image_token_index")]
    return next((token for token in candidates if isinstance(token, int)), None)


def _open(kind: Any, folder: Path, tokenizer: Tokenizer) -> Any:
    """The processor with its image part in PIL, whatever else is installed, and without the parts for videos and sound,
    which need further packages."""
    from transformers import AutoImageProcessor

    module: Any = sys.modules[kind.__module__]
    if getattr(module, "num2words", True) is None:  # SmolVLM demands it always, and uses it for videos only
        module.num2words = str
    lenient: Any = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda self, name, argument: None})
    parts = {
        "image_processor": AutoImageProcessor.from_pretrained(
            folder, backend="pil", local_files_only=True, trust_remote_code=False
        ),
        "tokenizer": _PlainTokenizer(tokenizer),
    }
    settings, _ = lenient.get_processor_dict(folder, local_files_only=True)
    return lenient.from_args_and_dict([parts.get(name) for name in kind.get_attributes()], settings)


def _bytes_of(arrays: Mapping[str, NDArray[Any]]) -> int:
    return sum(array.nbytes for array in arrays.values())
