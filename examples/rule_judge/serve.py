"""A judge without a language model: rules behind the HTTP contract of a real one, for tests and work offline.

`python examples/rule_judge/serve.py --port 18901` serves GET /v1/models and POST /v1/chat/completions. It reads words
only. Images are taken as a vision model takes them, and refused where that one would refuse them; what they show
it does not know: a tool's output with images is graded by what the host noted of each, how near it shows a part of its
source. `judge=boxes` is the rule that knows what should be in them.
"""

import argparse
import asyncio
import base64
import json
import os
import re
import sys
from fractions import Fraction

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from turnwise.errors import ConfigError
from turnwise.ext.judge.prompts import (
    ALLOWED_LINE,
    ANSWER,
    MARK_LINE,
    OF_OUTPUT,
    OUTPUT,
    QUESTION,
    REFERENCE,
    TRACE,
)
from turnwise.ext.judge.rubrics import BUNDLED, GENERAL, read_rubrics
from turnwise.ext.judge.settings import JudgeSettings
from turnwise.ext.judge.verdict import BINARY, VerdictScale
from turnwise.system.addresses import check_binding
from turnwise.system.image_bytes import KINDS, media_type
from turnwise.system.serving import Gate, serve_app

MODEL = "rule-judge"
MAX_NUMBER = 40
_LEAD = re.compile(r"^(?:so |thus |therefore )?(?:the |my )?(?:final )?(?:answer is|answer|it is|it s|its) ")
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:/[0-9]+)?")
_NOTED = re.compile(r"^\[image \d+: (\{.{0,2000}\})\]$", re.MULTILINE)
"""What the host notes of an image in a tool's output; see `evidence` in turn_scores.py."""
_FIGURE = re.compile(r"(?<![\w.])-?[0-9]+(?:\.[0-9]+)?(?![\w])")
_SMALL = {"a", "an", "the", "of", "is", "are", "was", "in", "on", "at", "to", "and", "or", "it", "what", "how", "many",
          "much", "which", "who", "where", "when", "why", "does", "do", "that", "this", "for", "with"}  # fmt: skip


class NotOurs(Exception):
    """A request that was not made of our prompts; a rule cannot read any other."""


class _Message(BaseModel):
    role: str
    content: str | list[dict[str, object]] | None = None


class ChatRequest(BaseModel):
    """What is read of a request."""

    model: str
    messages: list[_Message]
    max_tokens: int = 16


def reply_to(request: ChatRequest) -> str:
    """The verdict, as a judge writes it: by equality of meaning where there is a reference, else by shared words."""
    system = next((_text(one) for one in request.messages if one.role == "system"), "")
    user = next((_text(one) for one in request.messages if one.role == "user"), "")
    mark = _line(system, MARK_LINE)
    allowed = _line(system, ALLOWED_LINE)
    grid = BINARY if allowed == BINARY.allowed else _numbers(allowed)
    texts = {name: _fenced(user, name, mark) for name in (QUESTION, REFERENCE, ANSWER, OUTPUT, TRACE)}
    answer, reference = texts[ANSWER], texts[REFERENCE]
    if answer is not None and reference is not None:
        value = max(grid.values) if means_the_same(answer, reference) else min(grid.values)
    else:
        read = next((text for text in (texts[OUTPUT], texts[TRACE], answer) if text is not None), None)
        question = texts[QUESTION]
        if read is None or question is None:
            raise NotOurs("there is nothing to judge: no answer, no tool output, no trace")
        # The host's notes come last, one for each image of the output; whatever else looks like one was printed.
        drawn = images_of_output(request)
        noted = _NOTED.findall(read)[-drawn:] if drawn else []
        low, high = min(grid.values), max(grid.values)
        near = max(map(_nearness, noted), default=0.0)
        value = grid.nearest(low + (high - low) * _worth(_rubric(system), question, read, near))
    return ("TRUE" if value else "FALSE") if grid.words else f"{value:g}"


def means_the_same(answer: str, reference: str) -> bool:
    """Equal as numbers, or as words without case, punctuation, articles and a lead-in such as "The answer is"."""
    left, right = _plain(answer), _plain(reference)
    numbers = _as_number(left), _as_number(right)
    if numbers[0] is not None and numbers[1] is not None:
        return numbers[0] == numbers[1]
    return bool(right) and left == right


def images_of_output(request: ChatRequest) -> int:
    """How many images came with what is judged; NotOurs for any that no model could take."""
    found = drawn = 0
    is_output = False
    for message in request.messages:
        for part in message.content if isinstance(message.content, list) else ():
            is_output = is_output or part.get("text") == OF_OUTPUT
            if part.get("type") == "image_url":
                found, drawn = found + 1, drawn + is_output
                _check_image(part.get("image_url"), found)
    return drawn


def _check_image(given: object, number: int) -> None:
    url = given.get("url") if isinstance(given, dict) else None
    head, _, data = url.partition(",") if isinstance(url, str) else ("", "", "")
    try:
        content = base64.b64decode(data, validate=True)
    except ValueError as error:
        raise NotOurs(f"image {number} is not base64: {error}") from error
    if media_type(content) is None or head != f"data:{media_type(content)};base64":
        raise NotOurs(f"image {number} is no data URL of a {KINDS}")


def _rubric(system: str) -> str:
    """Which of the bundled rubrics a request grades by; the general one for any other."""
    kinds = read_rubrics(BUNDLED).values()
    return next((kind.name for kind in kinds if kind.evidence in system or kind.trace in system), GENERAL)


def _worth(rubric: str, question: str, read: str, near: float) -> float:
    """What an output is worth to each kind of question, from 0 to 1, by its words and by how near its images are."""
    printed = _NOTED.sub("", read)
    numbers = len(_FIGURE.findall(printed))
    if rubric == "visual_search":  # only a look counts
        return near
    if rubric == "calculation":  # values on the way, readings, or one bare value
        return {0: 0.5 if near else 0.0, 1: 0.25, 2: 0.75}.get(numbers, 1.0)
    if rubric == "counting":  # a line for each thing, an image to count in, or a number alone
        lines = sum(len(_FIGURE.findall(line)) > 1 for line in printed.splitlines())
        return (0.75 + 0.25 * (near > 0)) if lines > 1 else max(0.5 if near else 0.0, 0.25 * (numbers > 0))
    return max(shared_words(question, read), near)


def _nearness(noted: str) -> float:
    """What a noted image is worth unseen: nothing without a known part of a source, a quarter if it shows that at its
    own size or smaller, three quarters if larger."""
    try:
        facts = json.loads(noted)
        (left, upper, right, lower), (width, height) = facts["box"], facts["size"]
        return 0.75 if min(width / (right - left), height / (lower - upper)) > 1 else 0.25
    except (ValueError, TypeError, KeyError, ZeroDivisionError):
        return 0.0


def shared_words(question: str, text: str) -> float:
    """The share of the question's content words that the text has."""
    asked = {word for word in _plain(question).split() if word not in _SMALL}
    return len(asked & set(_plain(text).split())) / len(asked) if asked else 0.0


def make_app(model: str = MODEL, token: str | None = None, host: str = "127.0.0.1") -> FastAPI:
    """The server's app at this host."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Gate, host=host, token=token)

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [{"id": model, "object": "model", "owned_by": "turnwise"}]}

    @app.post("/v1/chat/completions")
    async def completions(request: ChatRequest) -> JSONResponse:
        if request.model != model:
            return _problem(404, f"the model {request.model!r} does not exist; this server has {model!r}")
        try:
            return JSONResponse(completion(request))
        except NotOurs as error:
            return _problem(400, f"the rule judge reads only Turnwise's judge prompts: {error}")

    return app


def completion(request: ChatRequest) -> dict[str, object]:
    """A response body; tokens are counted as words."""
    text = reply_to(request)
    read = sum(len(_text(message).split()) for message in request.messages)
    return {
        "id": "rule",
        "object": "chat.completion",
        "model": request.model,
        "system_fingerprint": "words-only",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": read, "completion_tokens": 1, "total_tokens": read + 1},
    }


def _problem(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, status_code=status)


def _text(message: _Message) -> str:
    if isinstance(message.content, list):
        return "\n".join(str(part.get("text", "")) for part in message.content if part.get("type") == "text")
    return message.content or ""


def _line(system: str, start: str) -> str:
    """The rest of the last line that has this in it; the system message is ours alone."""
    _, found, rest = system.rpartition(start)
    if not found:
        raise NotOurs(f"the system message does not say {start.strip()!r}")
    return rest.splitlines()[0].strip() if rest else ""


def _fenced(user: str, name: str, mark: str) -> str | None:
    _, found, rest = user.partition(f"<<<{name} {mark}>>>\n")
    if not found:
        return None
    text, closed, _ = rest.partition(f"\n<<<END {name} {mark}>>>")
    if not closed:
        raise NotOurs(f"the text {name!r} has no end")
    return text


def _numbers(allowed: str) -> VerdictScale:
    try:
        return VerdictScale(tuple(float(part) for part in allowed.split(",")))
    except ValueError as error:
        raise NotOurs(f"the allowed replies {allowed!r} are no numbers") from error


def _plain(text: str) -> str:
    """Lower case, words and numbers only; thousands' commas, currency and a last full stop are no part of a number."""
    text = re.sub(r"(?<=[0-9]),(?=[0-9]{3}\b)", "", text.lower()).replace("\u2212", "-")
    text = re.sub(r"[^\w\s./-]|(?<![0-9])[./]|[./](?![0-9])|(?<!\s)-(?=\s)|-(?![0-9])", " ", text)
    words = [word for word in text.split() if word not in ("a", "an", "the")] or text.split()  # A may be the answer
    return _LEAD.sub("", " ".join(words) + " ").strip()


def _as_number(text: str) -> Fraction | None:
    if len(text) > MAX_NUMBER or not _NUMBER.fullmatch(text):
        return None
    value, _, divisor = text.partition("/")
    return None if divisor and not int(divisor) else Fraction(value) / int(divisor or 1)


def main() -> None:
    """Serve until interrupted. Its token is what clients send unless they are told otherwise."""
    parser = argparse.ArgumentParser(description="A rule-based judge with the HTTP contract of a language model.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=18901)
    parser.add_argument("--model", default=MODEL, help="the name it serves under")
    args = parser.parse_args()
    variable = JudgeSettings().api_key_env
    token = os.environ.get(variable) or None
    try:
        check_binding(args.host, token, "a rule judge", "judges", f" in {variable}")
        sys.stderr.write(f"a rule judge on http://{args.host}:{args.port}/v1 until interrupted\n")
        asyncio.run(serve_app(make_app(args.model, token, args.host), args.host, args.port))
    except ConfigError as error:
        sys.exit(f"rule_judge: {error}")
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
