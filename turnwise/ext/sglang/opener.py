"""SGLang servers, started here or attached to: their native generate route with token ids, their routes for weights."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from turnwise.config import Config
from turnwise.config.sections import section
from turnwise.engines.devices import choose, gpus_for_sampler, visible_gpus
from turnwise.engines.model.sources import ModelSource
from turnwise.engines.opener import Say
from turnwise.engines.weight_updates import Adapter, Update, WeightsFolder
from turnwise.errors import EngineError, EngineLost
from turnwise.ext.servers.config import ServersConfig
from turnwise.ext.servers.gpus import sequences_of_a_copy
from turnwise.ext.servers.inference_server import ASK_SECONDS, FINISH, InferenceServer
from turnwise.ext.servers.opener import ReplicaSetup, ServersOpener
from turnwise.ext.servers.process import ServerProcess
from turnwise.ext.servers.same_model import refuse_other, sizes_of
from turnwise.ext.servers.streamed_sampler import StreamedSampler, StreamPiece, StreamRequest

PROBED_TEMPERATURE = 100.0
"""Where the likeliest token is hardly likelier than any other, if log-probs are those of the scaled distribution."""
SAME = 1e-3
"""How far two log-probs of one token may lie apart that were computed alike."""
SCALING = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "false", "RETURN_ORIGINAL_LOGPROB": "false"}
"""For servers that we start: log-probs of the temperature-scaled distribution, by its name now and before."""


class SglangServer(InferenceServer):
    """Implements Replica over an SGLang server.

    Its log-probs are those of the temperature-scaled distribution before top-k and top-p. Started with
    SGLANG_RETURN_ORIGINAL_LOGPROB it leaves the temperature out: the same at temperature 1, and refused at others:
    one cannot be computed from the other without all logits.

    It is shown no images: it writes their tokens anew from decoded text, and does not tell which it read.
    """

    unscaled = False
    """Whether its log-probs leave the temperature out; known once it is started."""
    _adapter: str | None = None
    _numbers = itertools.count()

    async def _inspect(self) -> None:
        info = await self._server.ask("GET", "/get_model_info", seconds=ASK_SECONDS)
        settings = await self._server.ask("GET", "/get_server_info", seconds=ASK_SECONDS)
        try:
            lengths = [settings.get(key) or info.get(key) for key in ("context_length", "max_req_input_len")]
            limits = [int(length) for length in lengths if length]
        except (AttributeError, TypeError, ValueError) as error:
            raise EngineError(f"{self.name} does not describe itself as SGLang does: {str(settings)[:300]}") from error
        if not limits:
            raise EngineError(f"{self.name} does not say how long a sequence may be: start it with --context-length")
        self.context_length, self._adapter = min(limits), None
        if self._process is None:
            self._check_attached(settings)
            most = settings.get("max_running_requests")
            self.sequences = most if type(most) is int else None
            refuse_other(self.name, self._sizes, await asyncio.to_thread(_sizes_of, info))
        self.unscaled = await self._leaves_temperature_out()

    async def _tells(self) -> str | None:
        info = await self._server.ask("GET", "/get_model_info", seconds=ASK_SECONDS)
        version = info.get("weight_version") if isinstance(info, dict) else None
        return None if version is None else str(version)

    def _check_attached(self, settings: dict[str, Any]) -> None:
        """Of a server that others started: can it do what is wanted of it?"""
        wanted = {"enable_memory_saver": self.capabilities.sleeps, "enable_lora": Adapter in self.capabilities.updates}
        for name, needed in wanted.items():
            if needed and name in settings and not settings[name]:
                raise EngineError(f"{self.name} cannot do what this run asks of it: start it with {_flag(name)}")

    async def _leaves_temperature_out(self) -> bool:
        """Tried: it tells no settings of that, and such log-probs look like any others."""
        plain, flat = [await self._likeliest(temperature) for temperature in (1.0, PROBED_TEMPERATURE)]
        return abs(plain - flat) < SAME

    async def _likeliest(self, temperature: float) -> float:
        """The log-prob of the likeliest next token, as the server tells it at this temperature."""
        sampling = {"max_new_tokens": 1, "temperature": temperature, "top_p": 1.0, "top_k": -1, "ignore_eos": True}
        body = {"input_ids": [1, 1], "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 1}
        answer = await self._server.ask("POST", "/generate", body, seconds=ASK_SECONDS)
        try:
            return float(answer["meta_info"]["output_top_logprobs"][0][0][0])
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise EngineError(
                f"{self.name} answered without log-probs of likely tokens: {str(answer)[:300]}"
            ) from error

    def refuse_unscaled(self, temperature: float) -> None:
        """EngineError where its log-probs are not of what was drawn from."""
        if self.unscaled and temperature not in (0.0, 1.0):
            raise EngineError(
                f"{self.name} gives log-probs without the temperature, which a learner at temperature {temperature:g} "
                "does not recompute: start it without SGLANG_RETURN_ORIGINAL_LOGPROB, or set sampling.temperature=1"
            )

    async def _stream(self, draw: StreamRequest) -> AsyncGenerator[StreamPiece, None]:
        params = draw.params
        self.refuse_unscaled(params.temperature)
        sampling = {
            "max_new_tokens": draw.limit, "temperature": params.temperature, "top_p": params.top_p,
            "top_k": params.top_k or -1, "sampling_seed": draw.seed % 2**31, "stop": list(params.stop_strings),
            "stop_token_ids": sorted(params.stop_ids), "ignore_eos": True, "no_stop_trim": True,
            "skip_special_tokens": False, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }  # fmt: skip
        body = {
            "input_ids": draw.token_ids.tolist(),
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": self.midway,
        }
        if self._adapter is not None:
            body["lora_path"] = self._adapter
        if not self.midway:
            yield self._piece(await self._server.write("/generate", body), 0)
            return
        count = 0
        async for event in self._server.stream("/generate", body):
            piece = self._piece(event, count)
            count += len(piece.ids)
            yield piece

    def _piece(self, event: dict[str, Any], received: int) -> StreamPiece:
        """What is new: a server repeats all tokens in every event, or with --incremental-streaming-output does not."""
        try:
            meta = event["meta_info"]
            version = meta.get("weight_version")
            written, finish = meta["output_token_logprobs"], meta["finish_reason"]
            count = meta["completion_tokens"]
            new = written[received:] if len(written) == count else written
            if received + len(new) != count:
                raise EngineError(f"{self.name} says it wrote {count} tokens, and {received + len(new)} came")
            ids, logprobs = [entry[1] for entry in new], [entry[0] for entry in new]
            ended = finish["type"] if finish else None
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise EngineError(f"{self.name} answered without tokens and log-probs: {str(event)[:300]}") from error
        if version is not None and self._attached and self._label is not None and version != self._label:
            raise self._other(version)
        if ended is not None and ended not in FINISH:
            raise EngineLost(f"{self.name} ended a turn by {finish}")
        return StreamPiece(ids, logprobs, FINISH.get(ended) if ended else None)

    async def _load(self, update: Update, version: int) -> None:
        self._label, label = None, self._named(version)
        if isinstance(update, Adapter):
            name = f"policy-{version}-{self._run}-{next(self._numbers)}"
            path = str(update.folder.resolve())
            await self._succeed("/load_lora_adapter", {"lora_name": name, "lora_path": path})
            await self._take_off(name)
            if self._attached:
                await self._succeed("/update_weight_version", {"new_version": label, "abort_all_requests": False})
        elif isinstance(update, WeightsFolder):
            body = {
                "model_path": str(update.folder.resolve()), "flush_cache": True, "abort_all_requests": True,
                "weight_version": label,
            }  # fmt: skip
            await self._succeed("/update_weights_from_disk", body)
            await self._take_off(None)
        if self._attached and await self._tells() is None:
            raise EngineError(
                f"{self.name} does not tell which weights it has (weight_version): take SGLang 0.5.1 or newer"
            )
        self._label = label
        await self._check_label()

    async def _take_off(self, adapter: str | None) -> None:
        """Write with this adapter, and forget the one before."""
        before, self._adapter = self._adapter, adapter
        if before is not None:
            await self._succeed("/unload_lora_adapter", {"lora_name": before})

    async def _succeed(self, path: str, body: dict[str, Any]) -> None:
        answer = await self._order(path, body)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise EngineError(f"{self.name}{path} did not succeed: {str(answer)[:300]}")

    async def _lie_down(self) -> None:
        if self.capabilities.sleeps:
            await self._order("/release_memory_occupation", {})

    async def _get_up(self) -> None:
        if self.capabilities.sleeps:
            await self._order("/resume_memory_occupation", {})


def _sizes_of(info: Any) -> dict[str, int]:
    """Of the model that a server names, where its folder is on a disk that we see; it tells none itself."""
    path = info.get("model_path") if isinstance(info, dict) else None
    try:
        return sizes_of(Path(str(path), "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _flag(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"


def sglang_command(python: str, options: list[str]) -> Callable[[int], list[str]]:
    """The command line of a server for a port."""
    return lambda port: [
        python, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(port),
        "--stream-interval", "16", *options,
    ]  # fmt: skip


class SglangServers(ServersOpener):
    """Of `engine=sglang_server`. They are shown no images."""

    package, server = "sglang", SglangServer
    copies_inside = "--enable-dp-attention"
    filters_logprobs = False

    def process(
        self, config: Config, setup: ReplicaSetup, name: str, logs: Path, devices: str | None, say: Say
    ) -> ServerProcess:
        """A server that gives log-probs of what it drew from."""
        environment = dict(SCALING) if devices is None else {"CUDA_VISIBLE_DEVICES": devices, **SCALING}
        command = sglang_command(self.python(config), sglang_options(config, setup.source))
        log = logs / f"{name.replace(' ', '_')}.log"
        return ServerProcess(name, command, log=log, environment=environment, say=say)

    def check_started(self, replica: StreamedSampler, config: Config) -> None:
        """Log-probs that leave the temperature out cannot be learned from."""
        assert isinstance(replica, SglangServer)
        replica.refuse_unscaled(config.sampling.temperature)


def sglang_options(config: Config, source: ModelSource) -> list[str]:
    """SGLang's command line; what the user adds comes last and wins."""
    engine, gpu = config.engine, bool(visible_gpus().gpus)
    options = [
        "--model-path", str(source.folder.resolve()), "--dtype", choose(config).precision.value,
        "--random-seed", str(config.seed), "--sampling-defaults", "openai",
    ]  # fmt: skip
    options += ["--mem-fraction-static", str(engine.memory_fraction)] if gpu else ["--device", "cpu"]
    options += ["--trust-remote-code"] if config.model.trust_remote_code else []
    at_once = sequences_of_a_copy(engine, section(config, ServersConfig), gpus_for_sampler(config).gpus)
    options += ["--max-running-requests", str(at_once)]
    options += ["--enable-memory-saver"] if engine.sleep and gpu else []
    if rank := config.learner.lora_rank:
        options += ["--enable-lora", "--max-lora-rank", str(rank), "--lora-target-modules", "all"]
    return [*options, *section(config, ServersConfig).options]
