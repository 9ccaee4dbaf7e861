"""A vLLM server as a sampler: token ids in, token ids and log-probs out over its completions API, with images over its
route for tokens, and new weights by its own routes for them."""

import asyncio
import base64
import itertools
import shlex
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from turnwise.engines.weight_updates import Adapter, FullWeights, Update, WeightsFolder
from turnwise.errors import ConfigError, EngineError, EngineLost
from turnwise.errors.nearest_name import unknown
from turnwise.ext.servers.images import check_prompt
from turnwise.ext.servers.inference_server import ASK_SECONDS, FINISH, InferenceServer
from turnwise.ext.servers.same_model import refuse_other, sizes_of
from turnwise.ext.servers.streamed_sampler import StreamPiece, StreamRequest
from turnwise.ext.vllm.nccl_transfer import OPTIONS, Transfer
from turnwise.ext.vllm.weight_labels import WeightLabels
from turnwise.ledger import Media
from turnwise.system.image_bytes import media_type

MARKED = "turnwise_marked"
"""The method of its workers that names the weights they loaded last."""
TOKENS = "/inference/v1/generate"
"""Of vLLM 0.32 or newer: the only route that takes token ids and images, tells which tokens it made of them, and which
weights wrote an answer; it makes no text of tokens."""


AS_WE_SEE = ["--mm-processor-kwargs", '{"use_fast": false}', "--no-mm-device-do-normalize"]
"""The same pixels as the learner's: torchvision scales otherwise than Pillow does, and vLLM's own normalising goes by a
file of the model's, not by its processor, and does nothing where the file leaves that out."""


class VllmServer(InferenceServer):
    """Implements Replica over a vLLM server. Weights and sleep need its development routes: VLLM_SERVER_DEV_MODE=1."""

    _loader = "turnwise_load"
    """The method of its workers that reads a folder."""
    _marks = True
    """Whether its workers have our extension, and so can name their weights."""
    transfer: Transfer | None = None
    """By which all weights come without files, where that was asked for."""
    _adapter: str | None = None
    _numbers = itertools.count()
    _tokens = False
    """Whether it has the route for tokens."""
    _labels: WeightLabels

    @property
    def _holds(self) -> bool:
        """An adapter belongs to a request, images to its cache of features, and sleep frees the cache: turns across an
        update are cut off there."""
        asleep_midway = self.capabilities.sleeps and self.midway
        cut = Adapter in self.capabilities.updates or self.capabilities.media or asleep_midway
        return self._tokens and not cut

    async def _inspect(self) -> None:
        listed = await self._server.ask("GET", "/v1/models", seconds=ASK_SECONDS)
        try:
            served = {str(entry["id"]): entry for entry in listed["data"] if not entry.get("parent")}
            if self._model is None:
                if len(served) != 1:
                    names = ", ".join(list(served)[:20]) or "none"
                    raise ConfigError(
                        f"{self.name} serves {len(served)} models ({names}); choose one with engine.model"
                    )
                self._model = next(iter(served))
            if self._model not in served:
                raise ConfigError(f"{self.name}: {unknown('model', self._model, served)}")
            self.context_length = int(served[self._model]["max_model_len"])
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{self.name} does not list models as vLLM does: {str(listed)[:300]}") from error
        self._adapter = None
        self._sent.forget()
        if self.transfer is not None:
            self.transfer.forget()
        self._tokens = await self._server.has(TOKENS, seconds=ASK_SECONDS)
        if self.keeps and not self._holds:
            raise EngineError(
                f"{self.name} cannot hold turns over an update (servers.cache_at_update=keep): that takes vLLM 0.32 or "
                "newer, started with --enable-scale-out"
            )
        if self._tokens:
            self._labels = WeightLabels(self.name)
            told = await self._server.ask("GET", "/weight_info", seconds=ASK_SECONDS)
            self._labels.begin(str(told["weight_version"] if isinstance(told, dict) else told))
        if self._process is None:
            await self._check_attached()

    async def _check_attached(self) -> None:
        """Of a server that others started: are its log-probs ours, and can it take weights?"""
        try:
            info = await self._server.ask("GET", "/server_info", seconds=ASK_SECONDS, params={"config_format": "json"})
            config = info["vllm_config"]
            mode, extension = config["model_config"]["logprobs_mode"], config["parallel_config"]["worker_extension_cls"]
            device = str(config["device_config"]["device"] or config["device_config"]["device_type"])
            sleeps, adapters = config["model_config"].get("enable_sleep_mode"), config.get("lora_config")
            transfer = (config.get("weight_transfer_config") or {}).get("backend")
            sizes = sizes_of(config["model_config"].get("hf_config"))
            copies = config["parallel_config"].get("data_parallel_size") or 1
            sequences = (config.get("scheduler_config") or {}).get("max_num_seqs")
        except (EngineError, KeyError, TypeError, AttributeError) as error:
            raise EngineError(
                f"{self.name} does not tell its settings: start it with VLLM_SERVER_DEV_MODE=1 in its environment"
            ) from error
        refuse_other(self.name, self._sizes, sizes)
        self.sequences = sequences * copies if type(sequences) is int and type(copies) is int else None
        if mode != "processed_logprobs":
            raise EngineError(f"{self.name} gives {mode}: start it with --logprobs-mode processed_logprobs")
        if self.capabilities.sleeps and not sleeps:
            raise EngineError(f"{self.name} cannot sleep: start it with --enable-sleep-mode, or leave engine.sleep out")
        if Adapter in self.capabilities.updates and not adapters:
            raise EngineError(f"{self.name} takes no adapters: start it with --enable-lora and --max-lora-rank")
        if self.transfer is not None and transfer != "nccl":
            raise EngineError(f"{self.name} takes no weights by NCCL: start it with {shlex.join(OPTIONS)}")
        self._marks = "WeightReader" in str(extension)
        self._loader = "turnwise_load" if self._marks else "reload_weights"
        if self._marks:
            await self._check_extension()
        else:
            if "cpu" in device and WeightsFolder in self.capabilities.updates:
                raise EngineError(
                    f"{self.name} runs on a CPU, where vLLM's own reloading leaves out the output layer: start it with "
                    "--worker-extension-cls vllm_worker.WeightReader (docs/ext/vllm.md)"
                )

    async def _check_extension(self) -> None:
        """It may be of an earlier version."""
        try:
            await self._order("/collective_rpc", {"method": MARKED})
        except EngineLost:
            raise
        except EngineError as error:
            raise EngineError(
                f"{self.name} has a worker extension that does not tell which weights it loaded: start it with the "
                f"vllm_worker.WeightReader of this version of Turnwise (docs/ext/vllm.md; {error})"
            ) from error

    async def _writer_answers(self, seconds: float) -> bool:
        """Whether it sleeps only the process that writes knows; /health is answered without that one."""
        try:
            await self._server.ask("GET", "/is_sleeping", seconds=seconds)
        except EngineLost:
            return False
        except EngineError:  # one without the question is known by /health alone
            return True
        return True

    async def _tells(self) -> str | None:
        """By our own extension the name of the weights, else which start of which server it is."""
        return await self._mark() if self._marks and self._adapter is None else await self._instance()

    async def _mark(self) -> str | None:
        try:
            answer = await self._server.ask("POST", "/collective_rpc", {"method": MARKED}, seconds=ASK_SECONDS)
            marks = {str(mark) for mark in answer["results"]}
        except (KeyError, TypeError):
            return None
        return " and ".join(sorted(marks))

    async def _instance(self) -> str | None:
        answer = await self._server.ask("GET", "/server_info", seconds=ASK_SECONDS, params={"config_format": "json"})
        try:
            instance = answer["vllm_config"]["instance_id"]
        except (KeyError, TypeError):
            return None
        return f"server {instance}" if instance else None

    async def try_image(self, marker: int, image: Media) -> str | None:
        """One that others started may make other pixels than the learner's, which its tokens do not show."""
        if self._process is None:
            info = await self._server.ask("GET", "/server_info", seconds=ASK_SECONDS, params={"config_format": "json"})
            try:
                settings = info["vllm_config"]["model_config"]["multimodal_config"] or {}
                ours = (
                    settings["mm_device_do_normalize"] is False and settings["mm_processor_kwargs"]["use_fast"] is False
                )
            except (KeyError, TypeError):
                ours = False
            if not ours:
                return f"{self.name} makes other pixels than the learner: start it with {shlex.join(AS_WE_SEE)}"
        return await super().try_image(marker, image)

    async def _stream(self, draw: StreamRequest) -> AsyncGenerator[StreamPiece, None]:
        asked = self.version
        path, body = await self._question(draw)
        whole = self._holds or not self.midway
        body |= {"stream": not whole}
        events = _once(self._server.write(path, body)) if whole else self._server.stream(path, body)
        first = True
        async with aclosing(events):
            async for event in events:
                if draw.media and first:
                    check_prompt(self.name, event.get("prompt_token_ids"), draw.token_ids)
                first = False
                for choice in event.get("choices") or ():
                    yield self._piece(choice, asked)

    async def _question(self, draw: StreamRequest) -> tuple[str, dict[str, Any]]:
        """The route that a turn takes, and what it is sent."""
        params = draw.params
        sampling = {
            "max_tokens": draw.limit, "temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k,
            "seed": draw.seed, "stop": list(params.stop_strings), "stop_token_ids": sorted(params.stop_ids),
            "ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False, "logprobs": 0,
            # Said although they are the defaults: a model's generation_config may have others.
            "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        }  # fmt: skip
        # What was computed with other weights must not be found: it is forgotten while turns are held, unless it is
        # kept for them; the salt then keeps it from the others.
        salt = f"run {self._run}" if self._holds and not self.keeps else f"version {self.version}"
        body: dict[str, Any] = {"model": self._adapter or self._model, "cache_salt": salt}
        if not self._tokens and not draw.media:
            tokens = {"prompt": draw.token_ids.tolist(), "add_special_tokens": False, "return_token_ids": True}
            return "/v1/completions", body | sampling | tokens
        # Text is made where stop strings are looked for, and nowhere else.
        sampling |= {"detokenize": bool(params.stop_strings)}
        body |= {"token_ids": self._marked(draw), "sampling_params": sampling}
        if draw.media:
            parts = [await asyncio.to_thread(_part, span.media, span.media.digest in draw.new) for span in draw.media]
            body |= {"content_parts": parts, "return_token_ids": True}
        return TOKENS, body

    def _piece(self, choice: Any, asked: int) -> StreamPiece:
        try:
            finish, ids = choice["finish_reason"], choice["token_ids"] or []
            logprob_info = choice["logprobs"] if ids else {"token_logprobs": []}
            logprobs = (
                logprob_info["token_logprobs"]
                if "token_logprobs" in logprob_info
                else [entry["logprob"] for entry in logprob_info["content"]]
            )
        except (KeyError, TypeError) as error:
            raise EngineError(f"{self.name} answered without tokens and log-probs: {str(choice)[:300]}") from error
        if not isinstance(ids, list) or not isinstance(logprobs, list):
            raise EngineError(f"{self.name} answered without lists of tokens and log-probs: {str(choice)[:300]}")
        if finish is not None and finish not in FINISH:
            raise EngineLost(f"{self.name} ended a turn by {finish!r}")
        versions = self._labels.versions(_spans(choice), asked) if self._holds and ids else ()
        return StreamPiece(ids, logprobs, FINISH.get(finish) if finish else None, versions)

    async def _load(self, update: Update, version: int) -> None:
        self._label, label = None, self._named(version)
        by_instance = self._attached and (isinstance(update, Adapter) or not self._marks)
        begun = await self._instance() if by_instance else None
        if by_instance and begun is None and not isinstance(update, Adapter):
            raise EngineError(
                f"{self.name} tells neither which weights it has nor which server it is: start it with "
                "--worker-extension-cls vllm_worker.WeightReader (docs/ext/vllm.md)"
            )
        await self._give(update, label, version)
        if self.capabilities.media:
            await self._order("/reset_encoder_cache")
        if not self._holds:
            # Its memory: what was computed with other weights is under another salt and would not be found again.
            await self._order("/reset_prefix_cache")
        self._label = begun if by_instance else label
        await self._check_label()

    async def _give(self, update: Update, label: str, version: int) -> None:
        if isinstance(update, Adapter):
            name = f"{self._model} {label} ({next(self._numbers)})"
            await self._order("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(update.folder.resolve())})
            await self._take_off(name)
            return
        # What we hung up on may still be computed there; or turns wait there, and their cache is kept or made anew.
        held = {"mode": "keep", "clear_cache": str(not self.keeps).lower()}
        await self._order("/pause", params=held if self._holds else {"mode": "abort"})
        if isinstance(update, FullWeights) and self.transfer is not None:
            size = await self._server.ask("GET", "/get_world_size", seconds=ASK_SECONDS)
            if not isinstance(size, dict) or type(size.get("world_size")) is not int or size["world_size"] < 1:
                raise EngineError(f"{self.name} does not say how many workers it has: {str(size)[:300]}")
            await self.transfer.load(update, self._order, size["world_size"])
            if self._attached and self._marks:
                await self._order("/collective_rpc", {"method": "turnwise_mark", "kwargs": {"label": label}})
        elif isinstance(update, WeightsFolder):
            key = "folder" if self._loader == "turnwise_load" else "weights_path"
            named = {"label": label} if self._loader == "turnwise_load" else {}
            rpc = {"method": self._loader, "kwargs": {key: str(update.folder.resolve()), **named}}
            await self._order("/collective_rpc", rpc)
        if self._tokens:
            await self._order("/update_weight_version", {"new_version": label})
            self._labels.add(label, version)
        await self._order("/resume")
        await self._take_off(None)

    async def _take_off(self, adapter: str | None) -> None:
        """Write with this adapter, and forget the one before."""
        before, self._adapter = self._adapter, adapter
        if before is not None:
            await self._order("/v1/unload_lora_adapter", {"lora_name": before})

    async def _lie_down(self) -> None:
        if self.capabilities.sleeps:
            await self._order("/sleep", params={"level": "1"})

    async def _get_up(self) -> None:
        if self.capabilities.sleeps:
            await self._order("/wake_up")


async def _once(answer: Awaitable[dict[str, Any]]) -> AsyncGenerator[dict[str, Any], None]:
    yield await answer


def _spans(choice: dict[str, Any]) -> list[tuple[str, int]] | None:
    """(label of weights, first token that they wrote) of an answer; None where it does not tell."""
    try:
        return [(span["version"], int(span["start"])) for span in choice["weight_versions"]]
    except (KeyError, TypeError, ValueError):
        return None


def _part(image: Media, sent: bool) -> dict[str, str]:
    """An image as it is sent, or as it is named that was sent before."""
    if not sent:
        return {"type": "image_url", "uuid": image.digest}
    content = base64.b64encode(image.content).decode("ascii")
    return {"type": "image_url", "uuid": image.digest, "url": f"data:{media_type(image.content)};base64,{content}"}


def vllm_command(python: str, options: list[str]) -> Callable[[int], list[str]]:
    """The command line of a server for a port."""
    start = [python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--served-model-name", "policy"]
    return lambda port: [*start, "--port", str(port), "--disable-uvicorn-access-log", *options]
