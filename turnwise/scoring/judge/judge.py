"""A judge: asks its endpoints for votes, keeps replies, and gives verdicts on the allowed grid."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from turnwise.errors import ScoringFailed
from turnwise.metrics import reduce
from turnwise.scoring.judge.cache import ReplyCache, cache_key
from turnwise.scoring.judge.client import JudgeClient
from turnwise.scoring.judge.images import data_url
from turnwise.scoring.judge.prompts import ChatMessage, Inquiry, again, evidence_only
from turnwise.scoring.judge.settings import REASON_TOKENS, JudgeSettings
from turnwise.scoring.judge.stats import JudgeStats, metrics_of
from turnwise.scoring.judge.verdict import QUARTERS, Grid, Verdict, majority
from turnwise.scoring.loop_resources import loop_resource, loop_resources
from turnwise.types import Image


class Judge:
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
    def shared(cls, settings: JudgeSettings) -> "Judge":
        """The one judge with these settings in the running event loop; `close_loop_resources` closes it."""
        return loop_resource(cls, settings.key, lambda: cls(settings))

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
        found = await asyncio.gather(
            *(self._vote(model, messages, inquiry.grid, vote) for vote in range(self.settings.votes)),
            return_exceptions=True,
        )
        votes = []
        for one in found:
            if isinstance(one, BaseException):
                raise one
            votes.append(one)
        return votes

    async def verdict(
        self,
        question: str,
        evidence: str,
        rubric: str,
        *,
        question_images: tuple[Image, ...] = (),
        images: tuple[Image, ...] = (),
        grid: Grid = QUARTERS,
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

    async def _vote(self, model: str, messages: list[ChatMessage], grid: Grid, vote: int) -> tuple[float, str]:
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

    async def _answer(self, key: str, body: dict[str, Any], grid: Grid) -> tuple[float, str]:
        """The reply from the cache, or from an endpoint, asked again while it is no verdict."""
        cache = self._open_cache()
        kept = None if cache is None else cache.get(key)
        explained = self.settings.explain
        value = None if kept is None else grid.parse(kept, explained=explained)
        if kept is not None and value is not None:
            self.stats.cache_hits += 1
            return value, kept
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
        asked = f"asked {self.settings.asks} times"
        raise ScoringFailed(f"the judge's reply is none of {grid.allowed}: {reply.text!r:.100}{cut} ({asked})")

    def _open_cache(self) -> ReplyCache | None:
        if self._cache is None and self.settings.cache is not None:
            self._cache = ReplyCache(Path(self.settings.cache))
        return self._cache


def take_metrics() -> dict[str, float]:
    """What the judges of the running event loop did since this was last called: `judge/requests` and so on."""
    judges = loop_resources(Judge)
    left = [metric for judge in judges for metric in judge.client.budget.metrics()]
    metrics = reduce([*metrics_of(judge.stats for judge in judges), *left])
    for judge in judges:
        judge.stats.reset()
    return metrics
