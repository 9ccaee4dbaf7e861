"""A retrieval service over the BM25 index, for `retrieve` and for verl's SearchTool:
`python -m turnwise.ext.research.corpus.retrieval_server --port 8000 [docs.jsonl ...]`.

POST /retrieve takes {"queries": [...], "topk": 3, "return_scores": true} and answers {"result": [[...], ...]}.
"""

import argparse
import asyncio
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from turnwise.ext.research.corpus.articles import Article, Corpus, open_corpus
from turnwise.system.addresses import check_binding
from turnwise.system.extras import without_extra

try:
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, Response

    from turnwise.system.serving import Gate, Intake, serve_app
except ModuleNotFoundError as error:
    raise without_extra("a retrieval server", "server", error, __name__) from error

MOST_QUERIES = 64
MOST_RESULTS = 100


class RetrievalRequest(BaseModel):
    """The body of a request to the retrieval service: queries, and how many results of each."""

    model_config = ConfigDict(strict=True)

    queries: list[Annotated[str, Field(max_length=10_000)]] = Field(min_length=1, max_length=MOST_QUERIES)
    topk: int = Field(default=3, ge=1, le=MOST_RESULTS)
    return_scores: bool = False


def make_app(corpus: Corpus, host: str = "127.0.0.1", token: str | None = None) -> FastAPI:
    """The service's app at this host."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Gate, host=host, token=token, intake=Intake(4_000_000, 30.0, 256))

    @app.post("/retrieve")
    async def retrieve(request: Request) -> Response:
        try:
            body = RetrievalRequest.model_validate_json(await request.body())
        except ValidationError as error:
            fault = error.errors(include_input=False, include_url=False)[0]
            return JSONResponse({"detail": f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"}, 422)
        return JSONResponse({"result": await asyncio.to_thread(_answer, corpus, body)})

    return app


def _answer(corpus: Corpus, body: RetrievalRequest) -> list[list[dict[str, Any]]]:
    results = [corpus.search(query, body.topk) for query in body.queries]
    if not body.return_scores:
        return [[_document(article) for article, _ in hits] for hits in results]
    return [[{"document": _document(article), "score": score} for article, score in hits] for hits in results]


def _document(article: Article) -> dict[str, str]:
    """As retrieval corpora have it: the title is the first line."""
    return {"id": article.id, "contents": f"{article.title}\n{article.text}"}


async def serve(host: str, port: int, files: list[str], token: str | None = None) -> None:
    """Serves searches in the corpus until the process is interrupted."""
    check_binding(host, token, "a retrieval server", "searches")
    await serve_app(make_app(open_corpus(files), host, token), host, port)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", help="jsonl files of articles (default: the shipped ones)")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    asyncio.run(serve("127.0.0.1", given.port, given.files))
