"""Small real servers that speak the HTTP of vLLM and of SGLang; their "model" adds numbers, so that everybody can tell
which weights wrote a token."""

import asyncio
import base64
import contextlib
import json
import queue
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

VOCABULARY = 100
CONTEXT = 64
MARKER = 90
"""The token that an image is put for; the image's last byte says how many of them it becomes."""


def next_token(ids: list[int], weights: int) -> int:
    """What follows these tokens with these weights: the last token, and one more or as many as the weights say."""
    return (ids[-1] + 1 + weights) % VOCABULARY


def logprob(weights: int) -> float:
    return -0.5 - weights


def children(pid: int) -> list[int]:
    """Of a process, whichever of its threads made them."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def is_there(pid: int) -> bool:
    """Whether a process runs; the dead that nobody has buried do not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@dataclass
class Model:
    """What both kinds of server share."""

    weights: int = 0
    """Read from a folder's file `weights`."""
    adapters: dict[str, int] = field(default_factory=dict)
    pause: float = 0.0
    """Seconds between two tokens."""
    asked: list[Any] = field(default_factory=list)
    called: list[str] = field(default_factory=list)
    streams: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    """What it was started with, as far as it tells."""
    wire: "queue.Queue[Any]" = field(default_factory=queue.Queue)
    """In place of NCCL: the number of ranks when all meet, then the tensors of every update."""
    label: str | None = None
    """What the weights were called that it loaded last."""
    instance: str = "abcde"
    """Another one for every server that is started."""
    path: str = "m"
    """Of its model."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Of its model, as its config has them."""
    refuses: bool = False
    old: bool = False
    """Whether it does not tell what it loaded."""
    tokens: bool = True
    """Whether it has vLLM's route for tokens, and holds turns over an update."""
    called_weights: str = "default"
    """By vLLM itself; every token has the name of the weights that wrote it."""
    running: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared while it is paused."""
    kept: list[str] = field(default_factory=list)
    """What every pause said of the cache."""
    unscaled: bool = False
    """Whether its log-probs leave the temperature out."""
    spoil: Callable[[dict[str, Any]], Any] = lambda event: event
    """Makes something else of an event; None hangs up."""

    images: dict[str, bytes] = field(default_factory=dict)
    """Those it has, by their names."""

    def expanded(self, ids: list[int], parts: list[dict[str, str]]) -> list[int] | None:
        """As vLLM does it: the first markers are the images'; None for an image that it does not have."""
        for part in parts:
            if "url" in part:
                self.images[part["uuid"]] = base64.b64decode(part["url"].partition(",")[2])
        if any(part["uuid"] not in self.images for part in parts):
            return None
        found, left = list[int](), [self.images[part["uuid"]][-1] for part in parts]
        for token in ids:
            found += [token] * (left.pop(0) if token == MARKER and left else 1)
        return found

    def __post_init__(self) -> None:
        self.running.set()

    async def write(
        self, ids: list[int], limit: int, stop: list[int], weights: int | None = None
    ) -> AsyncIterator[tuple[int, str]]:
        """Tokens with how the turn ended, if it did; by these weights, or by those that it has at each token."""
        self.streams += 1
        try:
            ids = list(ids)
            for number in range(1, limit + 1):
                await asyncio.sleep(self.pause)
                await self.running.wait()
                ids.append(next_token(ids, self.weights if weights is None else weights))
                yield ids[-1], "stop" if ids[-1] in stop else "length" if number == limit else ""
                if ids[-1] in stop:
                    return
        finally:
            self.streams -= 1

    async def events(self, made: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
        async with contextlib.aclosing(made) as found:  # type: ignore[type-var]
            async for event in found:
                spoiled = self.spoil(event)
                if spoiled is None:
                    raise ConnectionResetError
                yield spoiled if isinstance(spoiled, bytes) else b"data: " + json.dumps(spoiled).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"

    async def answer(self, request: Request, head: dict[str, Any], made: AsyncIterator[dict[str, Any]]) -> Response:
        """All choices as one; writing ends with the connection."""

        async def whole() -> Response:
            all_of = [choice async for choice in made]
            ids = [token for choice in all_of for token in choice["token_ids"]]
            (kind,) = all_of[-1]["logprobs"]
            chances = [one for choice in all_of for one in choice["logprobs"][kind]]
            choice = all_of[-1] | {"token_ids": ids, "logprobs": {kind: chances}}
            spoiled = self.spoil(head | {"choices": [choice]})
            return Response(spoiled) if isinstance(spoiled, bytes) else Response(json.dumps(spoiled))

        writing = asyncio.create_task(whole())
        hung_up = asyncio.create_task(request.receive())
        try:
            await asyncio.wait({writing, hung_up}, return_when=asyncio.FIRST_COMPLETED)
            return writing.result() if writing.done() else Response(status_code=500)
        finally:
            for task in (writing, hung_up):
                task.cancel()
            await asyncio.gather(writing, hung_up, return_exceptions=True)

    def called_by_name(self, method: str, given: dict[str, str]) -> Response:
        """A method of both workers."""
        if method == "turnwise_marked":
            return (
                JSONResponse({"error": "no such method"}, 500)
                if self.old
                else JSONResponse({"results": [self.label or ""] * 2})
            )
        self.load(given.get("folder") or given["weights_path"])
        self.label = given.get("label", self.label)
        return JSONResponse({"results": [None] * 2})

    def load(self, folder: str) -> None:
        self.weights = int(Path(folder, "weights").read_text())


def transfer_routes(model: Model) -> list[Route]:
    """Those of vLLM's own transfer of weights; two workers hear as one."""

    async def transfer(request: Request) -> Response:
        body = await request.json()
        model.called.append(request.url.path)
        if request.url.path == "/update_weights":
            sent = await asyncio.to_thread(model.wire.get, True, 30)
            about = body["update_info"]
            assert [list(one.shape) for one in sent] == about["shapes"] and about["dtype_names"] == [
                "bfloat16",
                "float32",
            ]
            model.weights = int(sent[about["names"].index("w")].sum())
        if request.url.path == "/init_weight_transfer_engine":
            if model.refuses:
                return JSONResponse({"error": "no NCCL here"}, 400)
            info = body["init_info"]
            assert await asyncio.to_thread(model.wire.get, True, 30) == info["world_size"] == 3
        return JSONResponse({"message": "done"})

    ways = ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update")
    return [Route(path, transfer, methods=["POST"]) for path in ways]


def token_route(model: Model) -> Route:
    """The one that takes token ids, and images with them, and tells which weights wrote an answer."""

    async def tokens(request: Request) -> Response:
        body = await request.json()
        if body["model"] not in {"policy", *model.adapters}:
            return JSONResponse({"error": {"message": "no such model", "code": 404}}, 404)
        model.asked.append(body)
        sampling, ids = body["sampling_params"], model.expanded(body["token_ids"], body.get("content_parts", []))
        if ids is None:
            return JSONResponse({"error": {"message": "Cache miss for image at index 0", "code": 400}}, 400)
        spans: list[dict[str, Any]] = []
        adapter = model.adapters.get(body["model"])

        async def choices() -> AsyncIterator[dict[str, Any]]:
            """One for each token; the last one has the spans."""
            written = model.write(ids, sampling["max_tokens"], sampling["stop_token_ids"], adapter)
            count = 0
            async with contextlib.aclosing(written) as found:  # type: ignore[type-var]
                async for token, finish in found:
                    if not spans or spans[-1]["version"] != model.called_weights:
                        spans.append({"version": model.called_weights, "start": count})
                    count += 1
                    spans[-1]["end"] = count
                    content = [{"token_id": token, "logprob": logprob(model.weights if adapter is None else adapter)}]
                    yield {
                        "token_ids": [token], "logprobs": {"content": content}, "finish_reason": finish or None,
                        "weight_versions": spans if finish else None,
                    }  # fmt: skip

        head = {"prompt_token_ids": ids if body.get("return_token_ids") else None}

        async def events() -> AsyncIterator[dict[str, Any]]:
            first = head
            async for choice in choices():
                yield first | {"choices": [choice]}
                first = {}

        if body["stream"]:
            return StreamingResponse(model.events(events()), media_type="text/event-stream")
        return await model.answer(request, head, choices())

    return Route("/inference/v1/generate", tokens, methods=["POST"])


def completion_route(model: Model) -> Route:
    """That of every vLLM."""

    async def completions(request: Request) -> Response:
        body = await request.json()
        model.asked.append(body)
        if body["model"] not in {"policy", *model.adapters}:
            return JSONResponse({"error": {"message": "no such model", "code": 404}}, 404)
        weights = model.adapters.get(body["model"], model.weights)
        if max(body["prompt"]) >= VOCABULARY:
            return JSONResponse({"error": {"message": "out of vocabulary", "code": 400}}, 400)

        async def choices() -> AsyncIterator[dict[str, Any]]:
            tokens = model.write(body["prompt"], body["max_tokens"], body["stop_token_ids"], weights)
            async with contextlib.aclosing(tokens) as found:  # type: ignore[type-var]
                async for token, finish in found:
                    chances = {"token_logprobs": [logprob(weights)]}
                    yield {"token_ids": [token], "logprobs": chances, "finish_reason": finish or None}

        if not body["stream"]:
            return await model.answer(request, {}, choices())
        events = ({"choices": [choice]} async for choice in choices())
        return StreamingResponse(model.events(events), media_type="text/event-stream")

    return Route("/v1/completions", completions, methods=["POST"])


def vllm_app(model: Model) -> Starlette:
    async def control(request: Request) -> Response:
        path = request.url.path
        model.called.append(path)
        body = json.loads(await request.body() or b"{}")
        if path == "/collective_rpc":
            return model.called_by_name(body["method"], body.get("kwargs", {}))
        if path == "/pause" and request.query_params["mode"] == "keep":
            model.running.clear()
            model.kept.append(request.query_params["clear_cache"])
        if path == "/resume":
            model.running.set()
        if path == "/update_weight_version":
            model.called_weights = body["new_version"]
        if path == "/v1/load_lora_adapter":
            model.adapters[body["lora_name"]] = int(Path(body["lora_path"], "weights").read_text())
        if path == "/v1/unload_lora_adapter":
            del model.adapters[body["lora_name"]]
        return JSONResponse({"success": True})

    async def models(_: Request) -> Response:
        return JSONResponse({"data": [{"id": "policy", "parent": None, "max_model_len": CONTEXT}]})

    async def info(_: Request) -> Response:
        config = {
            "model_config": {
                "logprobs_mode": "processed_logprobs", "enable_sleep_mode": True,
                "hf_config": f"Config {json.dumps(model.sizes)}\n",
                "multimodal_config": {"mm_device_do_normalize": False, "mm_processor_kwargs": {"use_fast": False}},
            },
            "scheduler_config": {"max_num_seqs": 12}, "device_config": {"device": "cuda"}, "parallel_config": {"worker_extension_cls": ""},
            "lora_config": {"max_lora_rank": 16}, "weight_transfer_config": {"backend": "nccl"},
        }  # fmt: skip
        config |= {} if model.old else {"instance_id": model.instance}  # type: ignore[dict-item]
        for section, values in model.settings.items():
            config[section] = values and config[section] | values
        return JSONResponse({"vllm_config": config})

    paths = ("/collective_rpc", "/pause", "/resume", "/update_weight_version", "/reset_prefix_cache", "/reset_encoder_cache", "/sleep", "/wake_up",
             "/v1/load_lora_adapter", "/v1/unload_lora_adapter")  # fmt: skip
    return Starlette(routes=[
        Route("/get_world_size", lambda _: JSONResponse({"world_size": 2})),
        *transfer_routes(model),
        Route("/health", lambda _: Response(status_code=200)), Route("/v1/models", models), Route("/server_info", info),
        completion_route(model),
        Route("/weight_info", lambda _: JSONResponse({"weight_version": model.called_weights})),
        *([token_route(model)] if model.tokens else []),
        *(Route(path, control, methods=["POST"]) for path in paths),
    ])  # fmt: skip


def generate_route(model: Model, told: Callable[[], dict[str, str]], *, repeats: bool) -> Route:
    """SGLang's for tokens."""

    async def generate(request: Request) -> Response:
        body = await request.json()
        sampling = body["sampling_params"]
        if "top_logprobs_num" in body:
            likeliest = -0.5 if model.unscaled or sampling["temperature"] == 1.0 else -4.6
            return JSONResponse({"meta_info": {"output_top_logprobs": [[[likeliest, 2, None]]]}})
        model.asked.append(body)
        if body.get("lora_path", "") not in {"", *model.adapters}:
            return JSONResponse({"error": {"message": "no such adapter"}}, 400)
        weights = model.adapters.get(body.get("lora_path", ""), model.weights)
        every: list[Any] = []

        async def made() -> AsyncIterator[dict[str, Any]]:
            tokens = model.write(body["input_ids"], sampling["max_new_tokens"], sampling["stop_token_ids"], weights)
            async with contextlib.aclosing(tokens) as found:  # type: ignore[type-var]
                async for token, finish in found:
                    every.append([logprob(weights), token, None])
                    meta = {
                        "completion_tokens": len(every), "output_token_logprobs": every if repeats or not body["stream"] else every[-1:],
                        "finish_reason": {"type": finish} if finish else None,
                    }  # fmt: skip
                    yield {"text": "", "meta_info": meta | told()}

        if not body["stream"]:
            return JSONResponse(model.spoil([event async for event in made()][-1]))
        return StreamingResponse(model.events(made()), media_type="text/event-stream")

    return Route("/generate", generate, methods=["POST"])


def sglang_app(model: Model, *, repeats: bool = True) -> Starlette:
    """`repeats`: every event has all tokens so far, as SGLang streams by default."""

    def told() -> dict[str, str]:
        return {} if model.old else {"weight_version": model.label or "default"}

    async def control(request: Request) -> Response:
        path, body = request.url.path, await request.json()
        model.called.append(path)
        if path == "/update_weights_from_disk":
            if not Path(body["model_path"], "weights").is_file():
                return JSONResponse({"success": False, "message": "no such folder"})
            model.load(body["model_path"])
            model.label = body["weight_version"]
        if path == "/update_weight_version":
            model.label = body["new_version"]
        if path == "/load_lora_adapter":
            model.adapters[body["lora_name"]] = int(Path(body["lora_path"], "weights").read_text())
        if path == "/unload_lora_adapter":
            del model.adapters[body["lora_name"]]
        return JSONResponse({"success": True})

    async def info(request: Request) -> Response:
        settings = {
            "context_length": CONTEXT,
            "enable_memory_saver": True,
            "enable_lora": True,
            "max_running_requests": 12,
        }
        settings |= model.settings
        return JSONResponse({"model_path": model.path} | told() if "model" in request.url.path else settings)

    paths = ("/update_weights_from_disk", "/update_weight_version", "/load_lora_adapter", "/unload_lora_adapter",
             "/release_memory_occupation", "/resume_memory_occupation")  # fmt: skip
    return Starlette(routes=[
        Route("/health", lambda _: Response(status_code=200)), Route("/get_model_info", info),
        Route("/get_server_info", info), generate_route(model, told, repeats=repeats),
        *(Route(path, control, methods=["POST"]) for path in paths),
    ])  # fmt: skip


if __name__ == "__main__":
    uvicorn.run(vllm_app(Model(pause=0.01)), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
