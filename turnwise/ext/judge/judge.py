"""A judge: shows its endpoints words and images, keeps replies on disk, and gives verdicts on the allowed grid."""

import asyncio
import base64
import contextlib
import hashlib
import io
import json
import math
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from turnwise.errors import ConfigError, DataError, ScoringFailed, StorageError
from turnwise.ext.judge.client import JudgeClient
from turnwise.ext.judge.prompts import ChatMessage, Inquiry, again, evidence_only
from turnwise.ext.judge.settings import REASON_TOKENS, JudgeSettings
from turnwise.ext.judge.stats import JudgeStats, metrics_of
from turnwise.ext.judge.verdict import QUARTERS, Verdict, VerdictScale, majority
from turnwise.scoring.event_loop_resources import Counting, loop_resource
from turnwise.system.image_bytes import FORMATS
from turnwise.system.image_sources import read_source
from turnwise.system.metrics import Metric
from turnwise.types import Image

if TYPE_CHECKING:
    from PIL.Image import Image as Picture


FILE = "verdicts.sqlite"
WAIT_SECONDS = 30.0
"""For another process that writes."""


def cache_key(body: dict[str, Any], vote: int) -> str:
    """The fingerprint of a request: model, messages, seed and whatever else it says, and which vote it is."""
    text = json.dumps([vote, body], sort_keys=True, ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


class ReplyCache:
    """One SQLite file in a folder. A process that dies leaves a whole file; a write that was cut off never was."""

    def __init__(self, folder: Path) -> None:
        self.path = folder.expanduser() / FILE
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(self.path, timeout=WAIT_SECONDS, isolation_level=None)
            self._keep_a_log()
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.execute("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL)")
        except (OSError, sqlite3.Error) as error:
            raise self._cannot("open", error) from error

    def _keep_a_log(self) -> None:
        """A log beside the file: readers and one writer at once, and no wait for the disk on each verdict.

        SQLite does not wait for its turn here, whatever the timeout: of several processes that start at once one wins.
        """
        until = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                self._database.execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                    raise
                time.sleep(0.01)

    def get(self, key: str) -> str | None:
        """The reply to an equal request, if there was one."""
        try:
            row = self._database.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            raise self._cannot("read", error) from error
        return None if row is None else str(row[0])

    def put(self, key: str, reply: str) -> None:
        """Keep a reply. When two processes asked the same, the first one stays, so that all read one verdict."""
        text = reply.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate cannot be stored
        try:
            self._database.execute("INSERT OR IGNORE INTO replies VALUES (?, ?)", (key, text))
        except sqlite3.Error as error:
            raise self._cannot("write", error) from error

    def close(self) -> None:
        """Closes the database file of the cache."""
        self._database.close()

    def _cannot(self, verb: str, error: Exception) -> StorageError:
        return StorageError(f"cannot {verb} the judge's cache {self.path}: {error}")


class LlmJudge(Counting):
    """Belongs to the event loop it is used in; nothing is opened before the first question."""

    def __init__(self, settings: JudgeSettings) -> None:
        self.settings = settings
        self.stats = JudgeStats()
        self.client = JudgeClient(settings, self.stats)
        self._cache: ReplyCache | None = None
        # Images are encoded before a request has its turn, so that only so many are in memory.
        self._showing = asyncio.Semaphore(settings.concurrency)
        self._under_way: dict[str, asyncio.Task[tuple[float, str]]] = {}

    @classmethod
    def shared(cls, settings: JudgeSettings) -> "LlmJudge":
        """The one judge with these settings in the running event loop; `close_loop_resources` closes it."""
        return loop_resource(cls, settings.key, lambda: cls(settings))

    @classmethod
    def take_counts(cls, resources: Sequence[Self]) -> list[Metric]:
        """What these judges did since this was last called: `judge/requests` and so on."""
        metrics = metrics_of(judge.stats for judge in resources)
        for judge in resources:
            judge.stats.reset()
        return metrics

    @classmethod
    def levels(cls, resources: Sequence[Self]) -> list[Metric]:
        """What is left of their budgets."""
        return [metric for judge in resources for metric in judge.client.budget.metrics()]

    async def decide(self, inquiry: Inquiry) -> Verdict:
        """The verdict of all votes; ScoringFailed when one cannot be had."""
        self.stats.verdicts += 1
        has_images = inquiry.images or inquiry.output_images
        try:
            async with self._showing if has_images else contextlib.nullcontext():
                votes = await self._votes(inquiry)
        except ScoringFailed:
            self.stats.failed_verdicts += 1
            raise
        values = tuple(value for value, _ in votes)
        verdict = Verdict(majority(values), values, tuple(reply for _, reply in votes))
        if len(votes) > 1:
            self.stats.agreements.append(verdict.agreement)
        return verdict

    async def _votes(self, inquiry: Inquiry) -> list[tuple[float, str]]:
        question, output, left_out = inquiry.shown(self.settings.max_images)
        messages = inquiry.messages(
            await self._urls(question), await self._urls(output), left_out=left_out, explain=self.settings.explain
        )
        model = await self.client.model()
        results = await asyncio.gather(
            *(self._vote(model, messages, inquiry.grid, vote) for vote in range(self.settings.votes)),
            return_exceptions=True,
        )
        votes = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            votes.append(result)
        return votes

    async def verdict(
        self,
        question: str,
        evidence: str,
        rubric: str,
        *,
        question_images: tuple[Image, ...] = (),
        images: tuple[Image, ...] = (),
        grid: VerdictScale = QUARTERS,
    ) -> Verdict:
        """How much this tool output with its images helps with the question, by the rubric; the judge sees no more."""
        return await self.decide(
            evidence_only(question, evidence, rubric, images=question_images, output_images=images, grid=grid)
        )

    async def _urls(self, images: tuple[Image, ...]) -> list[str]:
        return [await asyncio.to_thread(data_url, image, self.settings.max_pixels) for image in images]

    async def close(self) -> None:
        """Give up what is under way and close connections and cache."""
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.client.close()
        if self._cache is not None:
            self._cache.close()
            self._cache = None

    async def _vote(self, model: str, messages: list[ChatMessage], grid: VerdictScale, vote: int) -> tuple[float, str]:
        """One vote. Siblings often give the same answer at the same time: equal requests become one."""
        body: dict[str, Any] = {
            "model": model,
            "messages": messages,
            "temperature": self.settings.temperature,
            "seed": self.settings.seed + vote,
            "max_tokens": self.settings.max_tokens + (REASON_TOKENS if self.settings.explain else 0),
            **self.settings.extra_body,
        }
        key = cache_key(body, vote)
        task = self._under_way.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._answer(key, body, grid))
            self._under_way[key] = task
            task.add_done_callback(lambda done: self._finished(key, done))
        else:
            self.stats.joined += 1
        return await asyncio.shield(task)  # one who no longer waits must not take the answer from the others

    def _finished(self, key: str, task: asyncio.Task[tuple[float, str]]) -> None:
        del self._under_way[key]
        if not task.cancelled():
            task.exception()  # seen, even if all who asked have gone

    async def _answer(self, key: str, body: dict[str, Any], grid: VerdictScale) -> tuple[float, str]:
        """The reply from the cache, or from an endpoint, asked again while it is no verdict."""
        cache = self._open_cache()
        cached = None if cache is None else cache.get(key)
        explained = self.settings.explain
        value = None if cached is None else grid.parse(cached, explained=explained)
        if cached is not None and value is not None:
            self.stats.cache_hits += 1
            return value, cached
        messages: list[ChatMessage] = body["messages"]
        for _ in range(self.settings.asks):
            reply = await self.client.complete({**body, "messages": messages})
            value = grid.parse(reply.text, explained=explained) if reply.is_whole else None
            if value is not None:
                if cache is not None:
                    cache.put(key, reply.text)
                return value, reply.text
            self.stats.unreadable_replies += 1
            messages = again(body["messages"], reply.text, grid)
        cut = "" if reply.is_whole else f", cut off after max_tokens={body['max_tokens']}"
        attempts = f"asked {self.settings.asks} times"
        raise ScoringFailed(f"the judge's reply is none of {grid.allowed}: {reply.text!r:.100}{cut} ({attempts})")

    def _open_cache(self) -> ReplyCache | None:
        if self._cache is None and self.settings.cache is not None:
            self._cache = ReplyCache(Path(self.settings.cache))
        return self._cache


MAX_SOURCE_PIXELS = 100_000_000
"""A larger image is not decoded: its memory would be the host's."""
QUALITY = 90


def data_url(image: Image, max_pixels: int) -> str:
    """The image as a JPEG in a data URL, with at most this many pixels; transparent parts become white."""
    try:
        from PIL import Image as pillow
        from PIL import ImageOps
    except ModuleNotFoundError as error:
        raise ConfigError("showing images to a judge needs Pillow: pip install pillow") from error

    content = _content(image)
    try:
        with pillow.open(io.BytesIO(content), formats=(*FORMATS, "TIFF")) as picture:
            if picture.width * picture.height > MAX_SOURCE_PIXELS:
                raise ScoringFailed(f"{_name(image)} is too large to be shown: {picture.width} x {picture.height}")
            if picture.format == "JPEG":
                picture.draft("RGB", fitting(*picture.size, max_pixels))  # decoded at a fraction of its size
            flat = _on_white(ImageOps.exif_transpose(picture))  # upright, as the policy saw it
    except ScoringFailed:
        raise
    except Exception as error:  # a stranger's bytes: its decoders raise whatever they stumble over
        raise ScoringFailed(f"{_name(image)} cannot be read: {error}") from error
    size = fitting(*flat.size, max_pixels)
    if size != flat.size:
        flat = flat.resize(size, pillow.Resampling.LANCZOS)
    buffer = io.BytesIO()
    flat.save(buffer, "JPEG", quality=QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def fitting(width: int, height: int, max_pixels: int) -> tuple[int, int]:
    """The size with at most this many pixels and the same shape; never larger than it was."""
    if width * height <= max_pixels:
        return width, height
    factor = math.sqrt(max_pixels / (width * height))
    wide = min(max(1, int(width * factor)), max_pixels)
    return wide, min(max(1, int(height * factor)), max_pixels // wide)


def _on_white(picture: "Picture") -> "Picture":
    from PIL import Image as pillow

    if "A" in picture.getbands() or "transparency" in picture.info:
        clear = picture.convert("RGBA")
        white = pillow.new("RGBA", clear.size, "white")
        return pillow.alpha_composite(white, clear).convert("RGB")
    return picture.convert("RGB")


def _content(image: Image) -> bytes:
    source = image.source
    if source.startswith(("http://", "https://")):
        raise DataError(f"{_name(image)}: images are not fetched; give a file or a data URL")
    try:
        return read_source(source)
    except DataError as error:
        raise ScoringFailed(str(error)) from error


def _name(image: Image) -> str:
    return f"the image {image.source[:80]}"
