"""Stand-ins for the tools that verl shipped until 0.7: GSM8K and geometry checks, HTTP search, SandboxFusion."""

import os
from typing import Any

import httpx

from turnwise.errors import PluginError, ToolError
from turnwise.errors.address_passwords import has_userinfo
from turnwise.ext.research.tools.retrieve import RetrieveTool, passages
from turnwise.ext.sandbox.opening import TOKEN_ENV
from turnwise.ext.verl.stand_ins.rewards.gsm8k import compute_score
from turnwise.ext.verl.stand_ins.tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from turnwise.rollout.tools.image_zoom import fit_box
from turnwise.scoring.rules.boxes_and_tags import boxes
from turnwise.system.image_sources import read_source

NOT_IMPROVED = -0.05
"""verl's reward of a submission that is no better than the one before."""
_STATUSES_TO_RETRY = (500, 502, 503, 504)
_TRIES = 3


class _AnswerCheck(BaseTool):
    """Submissions of an answer: each is scored, and one that does not improve costs a little."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema)
        self._truths: dict[str, Any] = {}
        self._answers: dict[str, str] = {}
        self._rewards: dict[str, float] = {}

    async def create(self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any) -> Any:
        name, response = await super().create(instance_id)
        nested = kwargs.get("create_kwargs") or {}
        self._truths[name] = nested.get("ground_truth") if ground_truth is None else ground_truth
        self._answers[name], self._rewards[name] = "", 0.0
        return name, response

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        answer = str(parameters.get("answer", ""))
        self._answers[instance_id] = answer
        reward = await self.calc_reward(instance_id)
        better = reward > self._rewards[instance_id]
        self._rewards[instance_id] = reward
        return ToolResponse(text=f"Current parsed {answer=} {reward=}"), 0.0 if better else NOT_IMPROVED, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self._truths[instance_id], self._answers[instance_id], self._rewards[instance_id]


class Gsm8kTool(_AnswerCheck):
    """The tool `calc_gsm8k_reward(answer)`, which checks an answer of GSM8K."""

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        answer = self._answers[instance_id]
        answer = answer if answer.startswith("#### ") else f"#### {answer}"
        return compute_score(answer, self._truths[instance_id], method="flexible")


class Geo3kTool(_AnswerCheck):
    """`calc_geo3k_reward(answer)`: the answer means the same as the ground truth."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema)
        from turnwise.scoring.rules.math_boxed import is_same  # an extra brings what it needs

        self._is_same = is_same

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        truth, answer = str(self._truths[instance_id]), self._answers[instance_id]
        return float(await self._is_same((truth,), (boxes(answer) or [answer])[-1], 5.0))


class SearchTool(BaseTool):
    """`search(query_list)` against a retrieval service, asked as the built-in tool `retrieve` asks it."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema)
        url = str(config.get("retrieval_service_url") or "")
        if not url:
            raise PluginError("SearchTool needs config.retrieval_service_url")
        self._service = RetrieveTool(
            url=url, topk=int(config.get("topk", 3)), seconds=float(config.get("timeout", 30)), retries=_TRIES - 1
        )

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        queries = parameters.get("query_list")
        if not isinstance(queries, list) or not queries or not all(isinstance(query, str) for query in queries):
            raise ToolError("query_list is missing, empty or no list of texts")
        async with httpx.AsyncClient(timeout=self._service.seconds) as client:
            results = await self._service.ask(client, queries)
        metrics = {"query_count": len(queries), "total_results": sum(map(len, results)), "status": "success"}
        return ToolResponse(text=passages(results)), 0.0, metrics


class SandboxFusionTool(BaseTool):
    """`code_interpreter(code)` against a SandboxFusion server, such as `turnwise sandbox serve`."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema)
        self._url = str(config.get("sandbox_fusion_url") or "")
        if not self._url:
            raise PluginError(
                "SandboxFusionTool needs config.sandbox_fusion_url; the built-in tool `python` needs none"
            )
        if has_userinfo(self._url):
            raise PluginError(f"SandboxFusionTool: no password in sandbox_fusion_url: set {TOKEN_ENV}")
        self._timeout = float(config.get("default_timeout", 30))
        self._language = str(config.get("default_language", "python"))
        self._memory = int(config.get("memory_limit_mb", 1024))

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        request = {
            "code": str(parameters.get("code", "")), "language": parameters.get("language", self._language),
            "run_timeout": parameters.get("timeout", self._timeout), "compile_timeout": self._timeout,
            "stdin": None, "memory_limit_MB": self._memory, "files": {}, "fetch_files": [],
        }  # fmt: skip
        answer = await _post(self._url, request, self._timeout + 10)
        result = answer.get("run_result") or answer.get("compile_result") or {}
        if answer.get("status") == "SandboxError":
            raise ToolError(f"the sandbox failed: {answer.get('message', '')}")
        text = (result.get("stdout") or "") + (result.get("stderr") or "")
        return ToolResponse(text=text or "no stdout here"), None, {"status": str(result.get("status"))}


async def _post(url: str, body: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The server's answer; a server that has trouble is asked again, and then the model is told."""
    problem = ""
    token = os.environ.get(TOKEN_ENV)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with httpx.AsyncClient(timeout=seconds, headers=headers) as client:
        for _ in range(_TRIES):
            try:
                response = await client.post(url, json=body)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if response.status_code in _STATUSES_TO_RETRY:
                problem = f"status {response.status_code}"
                continue
            if response.is_error:
                raise ToolError(f"{url} answered {response.status_code}")
            content = response.json()
            if not isinstance(content, dict):
                raise ToolError(f"{url} did not answer with a JSON object")
            return content
    raise ToolError(f"{url} cannot be reached: {problem}")


class ImageZoomInTool(BaseTool):
    """`image_zoom_in_tool(bbox_2d, label)`: a part of the row's image, cut out as the built-in `image_zoom` does."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema)
        self._images: dict[str, Any] = {}

    async def create(self, instance_id: str | None = None, image: Any = None, **kwargs: Any) -> Any:
        name, response = await super().create(instance_id)
        source = (kwargs.get("create_kwargs") or {}).get("image") if image is None else image
        if source is None:
            raise PluginError("image_zoom_in_tool needs tools_kwargs.image_zoom_in_tool.create_kwargs.image")
        self._images[name] = _opened(source)
        return name, response

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        image, coordinates = self._images[instance_id], parameters.get("bbox_2d")
        if not isinstance(coordinates, list) or len(coordinates) != 4:
            raise ToolError(f"bbox_2d must be [left, top, right, bottom], not {coordinates!r:.80}")
        try:
            box = fit_box(coordinates, image)
        except ToolError as error:
            return ToolResponse(text=f"Error: {error}"), NOT_IMPROVED, {"success": False}
        label = parameters.get("label", "")
        text = f"Zoomed in on the image to the region {list(box)}" + (f" with label {label}." if label else ".")
        return ToolResponse(image=[image.crop(box)], text=text), 0.0, {"success": True}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._images.pop(instance_id, None)


def _opened(source: Any) -> Any:
    """PIL's image of a data URL, of bytes, or of a local file."""
    import io

    from PIL import Image

    if isinstance(source, dict):
        source = source.get("bytes") or source.get("image") or source.get("path")
    if hasattr(source, "crop"):
        return source
    content = source if isinstance(source, bytes) else read_source(str(source))
    return Image.open(io.BytesIO(content)).convert("RGB")


class MCPBaseTool(BaseTool):
    """Tools of MCP servers are opened by the reader of the YAML file itself, which keeps their schemas whole."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        raise PluginError("an MCP tool needs `config.type: mcp` and an entry `mcp` in the YAML file")


class MCPSearchTool(MCPBaseTool):
    """verl's MCP search tool, here the same as its base class."""
