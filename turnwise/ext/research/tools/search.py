"""The `search` tool: BM25 over the shipped articles, or over a user's own files, without a network."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from turnwise.ext.research.corpus.articles import Article, Corpus, open_corpus
from turnwise.rollout.plugin_options import read_settings
from turnwise.rollout.tools.tool import DEFAULT_CONCURRENCY, DEFAULT_TIMEOUT, ToolContext, ToolSession
from turnwise.types import JsonSchema, ToolResult

MOST_RESULTS = 10
LONGEST_QUERY = 1000


class SearchSettings(BaseModel):
    """`config` of an entry {name: search} in a file of tools."""

    model_config = ConfigDict(extra="forbid")

    files: list[str] = Field(default_factory=list)
    k: int = Field(default=3, ge=1, le=MOST_RESULTS)
    passage_chars: int = Field(default=600, ge=1)


@dataclass(slots=True)
class CorpusSearchTool:
    """A search: `CorpusSearchTool(files=("docs.jsonl",))`, or an entry {name: search, config: ...} in a file of tools.

    Each line of a file is {"id", "title", "text"}; without files it searches the shipped articles.
    """

    name: str = "search"
    files: tuple[str, ...] = ()
    k: int = 3
    """Passages, unless the model asks for another number."""
    passage_chars: int = 600
    """Of one passage that are shown."""
    timeout: float = DEFAULT_TIMEOUT
    concurrency: int = DEFAULT_CONCURRENCY
    _corpus: Corpus | None = None

    @property
    def schema(self) -> JsonSchema:
        parameters = {
            "type": "object",
            "properties": {
                "query": {"type": "string", "maxLength": LONGEST_QUERY},
                "k": {"type": "integer", "minimum": 1, "maximum": MOST_RESULTS},
            },
            "required": ["query"],
        }
        about = "Search the articles; gives the best passages, each with its [id]."
        return {"type": "function", "function": {"name": self.name, "description": about, "parameters": parameters}}

    def configured(self, config: Mapping[str, Any], folder: Path) -> "CorpusSearchTool":
        """A search of its own: {files: [docs.jsonl], k: 5}."""
        read = read_settings(SearchSettings, config, f"config of {self.name}")
        files = tuple(str(folder / Path(name).expanduser()) for name in read.files)
        return CorpusSearchTool(self.name, files, read.k, read.passage_chars)

    async def start(self) -> str:
        """Read the files and index them; a mistake in them is found before the first episode."""
        self._corpus = await asyncio.to_thread(open_corpus, self.files)
        return f"{len(self._corpus.articles)} articles of {', '.join(self.files) or 'the shipped corpus'}"

    async def stop(self) -> None:
        """Does nothing: the corpus takes only memory."""

    async def open(self, context: ToolContext) -> ToolSession:
        return _SearchSession(self)

    async def search(self, query: str, k: int) -> list[tuple[Article, float]]:
        """The best articles, found beside the event loop."""
        if self._corpus is None:  # a row chose it after the run had started
            await self.start()
        assert self._corpus is not None
        return await asyncio.to_thread(self._corpus.search, query, k)


@dataclass(slots=True)
class _SearchSession:
    tool: CorpusSearchTool

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        hits = await self.tool.search(arguments["query"], arguments.get("k", self.tool.k))
        facts = {"ids": [article.id for article, _ in hits], "scores": [round(score, 4) for _, score in hits]}
        if not hits:
            return ToolResult("No article holds any of these words.", info=facts)
        lines = [f"{n}. {_passage(article, self.tool.passage_chars)}" for n, (article, _) in enumerate(hits, 1)]
        return ToolResult("\n".join(lines), info=facts)

    async def close(self) -> None:
        return None


def _passage(article: Article, limit: int) -> str:
    text = " ".join(article.text.split())
    excerpt = text if len(text) <= limit else text[:limit] + " ..."
    return f"[{article.id}] {article.title}: {excerpt}"


search = CorpusSearchTool()
