"""vLLM in this process (`AsyncLLM`): its scheduler and workers are its own processes, its requests are ours."""

import asyncio
import io
import itertools
import os
import socket
from collections.abc import AsyncGenerator, Sequence
from importlib import import_module
from typing import Any

from turnwise.engines.samplers.in_flight import DecodeText
from turnwise.engines.samplers.sampler import Capabilities
from turnwise.engines.weight_updates import Adapter, Update, WeightsFolder
from turnwise.errors import ConfigError, EngineError, EngineLost, one_line
from turnwise.ext.servers.images import check_prompt
from turnwise.ext.servers.inference_server import FINISH
from turnwise.ext.servers.streamed_sampler import StreamedSampler, StreamPiece, StreamRequest
from turnwise.ext.vllm.weight_labels import WeightLabels

EXTENSION = "turnwise.ext.vllm.worker.WeightReader"


class VllmEngine(StreamedSampler):
    """Implements Replica on an `AsyncLLM` of this process, which is made anew when its engine dies."""

    def __init__(
        self, options: Sequence[str], *, vocabulary: int, decode: DecodeText, capabilities: Capabilities
    ) -> None:
        """`options` are those of vLLM's command line."""
        super().__init__(
            "vllm engine", context_length=0, vocabulary=vocabulary, decode=decode, capabilities=capabilities
        )
        self._options = [*options, "--worker-extension-cls", EXTENSION]
        self._llm: Any = None
        self._lora: Any = None
        self._numbers = itertools.count(1)
        self._labels: WeightLabels | None = None
        """Of a vLLM that tells which weights wrote a turn."""

    @property
    def _holds(self) -> bool:
        """An adapter belongs to a request, images to its cache of features, and sleep frees the cache: turns across an
        update are cut off there."""
        asleep_midway = self.capabilities.sleeps and self.midway
        cut = Adapter in self.capabilities.updates or self.capabilities.media or asleep_midway
        return self._labels is not None and not cut

    async def start(self) -> None:
        """Load the model; then `context_length` is known."""
        try:
            self._llm = await asyncio.to_thread(_open, self._options)
        except ConfigError:
            raise
        except Exception as error:  # whatever vLLM raises: a model it does not know, no memory, an option it refuses
            raise EngineError(f"vLLM cannot start: {one_line(error)[:500]}") from error
        self.context_length = int(self._llm.model_config.max_model_len)
        self._sent.forget()
        ours = (os.getpid(), socket.gethostname())
        await self._order(self._llm.collective_rpc("turnwise_end_with", args=ours))
        if hasattr(self._llm, "update_weight_version"):  # not before 0.32
            self._labels = WeightLabels(self.name)
            self._labels.begin(await self._llm.get_weight_version())
        if self.keeps and not self._holds:
            raise EngineError("servers.cache_at_update=keep takes vLLM 0.32 or newer, which holds turns over an update")

    async def healthy(self) -> bool:
        """Whether its processes are there."""
        return self._llm is not None and not self._llm.errored

    async def restart(self) -> None:
        """Ends the engine and starts a new one."""
        await self._lose("vLLM's engine is being restarted")
        await self._end()
        await self.start()
        self._is_back()

    async def _stream(self, draw: StreamRequest) -> AsyncGenerator[StreamPiece, None]:
        params, kinds = draw.params, import_module("vllm.sampling_params")
        sampling = kinds.SamplingParams(
            max_tokens=draw.limit, temperature=params.temperature, top_p=params.top_p, top_k=params.top_k,
            seed=draw.seed, stop=list(params.stop_strings), stop_token_ids=sorted(params.stop_ids), ignore_eos=True,
            include_stop_str_in_output=True, skip_special_tokens=False, detokenize=bool(params.stop_strings),
            logprobs=0, flat_logprobs=True, output_kind=self._output_kind(kinds),
        )  # fmt: skip
        # What was computed with other weights is forgotten while turns are held, or kept for them alone by the salt.
        salt = "ours" if self._holds and not self.keeps else f"version {self.version}"
        prompt: dict[str, Any] = {"prompt_token_ids": self._marked(draw), "cache_salt": salt}
        if draw.media:
            prompt["multi_modal_data"] = {"image": await asyncio.to_thread(_pictures, draw)}
            prompt["multi_modal_uuids"] = {"image": [span.media.digest for span in draw.media]}
        name, asked = f"turn {next(self._numbers)}", self.version
        try:
            async for output in self._llm.generate(prompt, sampling, name, lora_request=self._lora):
                if draw.media:
                    check_prompt(self.name, output.prompt_token_ids, draw.token_ids)
                yield self._piece(output.outputs[0], asked)
        except import_module("vllm.v1.engine.exceptions").EngineDeadError as error:
            raise EngineLost(f"vLLM's engine died: {one_line(error)}") from error
        except ValueError as error:  # a request that it refuses
            raise EngineError(f"vLLM refuses a turn: {one_line(error)[:300]}") from error

    def _output_kind(self, kinds: Any) -> Any:
        """The whole turn at once, unless an update may cut it off."""
        kind = kinds.RequestOutputKind
        return kind.FINAL_ONLY if self._holds or not self.midway else kind.DELTA

    def _piece(self, output: Any, asked: int) -> StreamPiece:
        ids, chances = list(output.token_ids), output.logprobs
        try:  # the drawn token comes first of those that a place tells of
            logprobs = [chances.logprobs[start] for start in chances.start_indices] if ids else []
        except (AttributeError, IndexError) as error:
            raise EngineError(f"vLLM answered without log-probs: {str(chances)[:300]}") from error
        if output.finish_reason is not None and output.finish_reason not in FINISH:
            raise EngineLost(f"vLLM ended a turn by {output.finish_reason!r}")
        versions: list[tuple[int, int]] = []
        if self._holds and self._labels is not None and ids:
            spans = output.weight_versions
            told = None if spans is None else [(span.version, span.start) for span in spans]
            versions = self._labels.versions(told, asked)
        return StreamPiece(ids, logprobs, FINISH.get(output.finish_reason) if output.finish_reason else None, versions)

    async def _load(self, update: Update, version: int) -> None:
        if isinstance(update, Adapter):
            number, kinds = next(self._numbers), import_module("vllm.lora.request")
            adapter = kinds.LoRARequest(f"version {version}", number, str(update.folder.resolve()))
            await self._order(self._llm.add_lora(adapter))
            await self._take_off(adapter)
        elif isinstance(update, WeightsFolder):
            held = {"mode": "keep", "clear_cache": not self.keeps} if self._holds else {"mode": "abort"}
            await self._order(self._llm.pause_generation(**held))
            await self._order(self._llm.collective_rpc("turnwise_load", args=(str(update.folder.resolve()),)))
            if self._holds and self._labels is not None:
                await self._order(self._llm.update_weight_version(f"version {version}"))
                self._labels.add(f"version {version}", version)
            await self._order(self._llm.resume_generation())
            await self._take_off(None)
        if not self._holds:
            await self._order(self._llm.reset_prefix_cache())
        if self.capabilities.media:
            await self._order(self._llm.reset_encoder_cache())

    async def _take_off(self, adapter: Any) -> None:
        """Write with this adapter, and forget the one before."""
        before, self._lora = self._lora, adapter
        if before is not None:
            await self._order(self._llm.remove_lora(before.lora_int_id))

    async def _order(self, work: Any) -> None:
        try:
            await work
        except Exception as error:  # whatever its workers raise
            if await self.healthy():
                raise EngineError(f"vLLM: {one_line(error)[:500]}") from error
            raise EngineLost(f"vLLM's engine died: {one_line(error)[:300]}") from error

    async def _lie_down(self) -> None:
        if self.capabilities.sleeps:
            await self._order(self._llm.sleep(level=1))

    async def _get_up(self) -> None:
        if self.capabilities.sleeps:
            await self._order(self._llm.wake_up())

    async def _end(self) -> None:
        llm, self._llm, self._lora = self._llm, None, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown)


def _pictures(draw: StreamRequest) -> list[Any]:
    """The images that are sent, unpacked."""
    from PIL import Image

    sent = [span.media if span.media.digest in draw.new else None for span in draw.media]
    return [None if media is None else Image.open(io.BytesIO(media.content)).convert("RGB") for media in sent]


def _open(options: Sequence[str]) -> Any:
    kind = import_module("vllm.engine.arg_utils").AsyncEngineArgs
    parser = kind.add_cli_args(import_module("vllm.utils.argparse_utils").FlexibleArgumentParser())
    try:
        arguments = parser.parse_args(list(options))
    except SystemExit as error:  # it has said on standard error what it does not know
        raise ConfigError(f"vLLM does not take servers.options={list(options)}") from error
    return import_module("vllm.v1.engine.async_llm").AsyncLLM.from_engine_args(kind.from_cli_args(arguments))
