"""Opens vLLM: in this process, as servers that we start, or as servers that run already."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from turnwise.chat.images.processor import ImageProcessor
from turnwise.chat.renderer import Renderer
from turnwise.config import ONE_MACHINE, Config
from turnwise.config.sections import section
from turnwise.engines.devices import choose, gpus_for_sampler, visible_gpus
from turnwise.engines.model.sources import ModelSource
from turnwise.engines.opener import Say
from turnwise.engines.weight_updates import FullWeights, Update
from turnwise.errors import ConfigError
from turnwise.ext.servers.config import CacheAtUpdate, ServersConfig, WeightTransfer
from turnwise.ext.servers.gpus import sequences_of_a_copy
from turnwise.ext.servers.inference_server import InferenceServer
from turnwise.ext.servers.opener import GuestOpener, ReplicaSetup, ServersOpener
from turnwise.ext.servers.option_checks import API_KEY_ENV
from turnwise.ext.servers.process import ServerProcess
from turnwise.ext.servers.same_model import Sizes
from turnwise.ext.servers.streamed_sampler import StreamedSampler
from turnwise.ext.vllm import worker
from turnwise.ext.vllm.engine import VllmEngine
from turnwise.ext.vllm.nccl_transfer import OPTIONS, Transfer
from turnwise.ext.vllm.server import AS_WE_SEE, VllmServer, vllm_command

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""That vLLM has room made for."""
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
CPU_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "2"}
"""Several servers and a learner share the cores and the memory; said where the environment does not say otherwise."""
CPU_OPTIONS = ["--enforce-eager", "--no-enable-chunked-prefill"]
"""On a CPU vLLM dies of a request with a seed whose prompt it reads in parts: its generators have no offset there."""
COPIES = "VLLM_DP_SIZE"
STREAM_INTERVAL = 64
"""Tokens that come together where a turn is streamed: a piece costs as much as many tokens, and an update that cuts a
turn off loses half of one."""


def refuse_keep(config: Config) -> None:
    """ConfigError where turns cannot be held over an update, whichever vLLM runs."""
    if section(config, ServersConfig).cache_at_update is not CacheAtUpdate.keep:
        return
    why = "an adapter belongs to a turn from its start (learner.lora_rank)" if config.learner.lora_rank else ""
    why = why or ("engine.sleep=true frees the cache" if config.engine.sleep else "")
    if why:
        raise ConfigError(f"servers.cache_at_update=keep: {why}; leave it at recompute")


class VllmHere(GuestOpener):
    """Of `engine=vllm`: vLLM in this process."""

    package = "vllm"
    missing = "install it in Turnwise's environment"
    takes_first_gpus = True
    copies_variable = COPIES

    def replicas(self, config: Config, setup: ReplicaSetup, say: Say) -> Sequence[StreamedSampler]:
        """The engine; what it must know of the environment is said first."""
        for name, value in {
            **(CPU_ENVIRONMENT if not visible_gpus().gpus else {}),
            "VLLM_LOGGING_LEVEL": "WARNING",
        }.items():
            os.environ.setdefault(name, value)
        options = vllm_options(config, setup.source, sees=setup.sees)
        return [VllmEngine(options, vocabulary=setup.vocabulary, decode=setup.decode, capabilities=setup.capabilities)]

    def check_settings(self, config: Config) -> None:
        """Also whether turns can be held over an update, where that is wanted."""
        super().check_settings(config)
        refuse_keep(config)

    async def image_processor(self, config: Config, renderer: Renderer, say: Say) -> ImageProcessor | None:
        """The model's own, where this vLLM takes images with token ids."""
        return await _image_processor(renderer, self.python(config), say)


class VllmServers(ServersOpener):
    """Of `engine=vllm_server`."""

    package, server, served_model = "vllm", VllmServer, "policy"
    copies_variable = COPIES

    def process(
        self, config: Config, setup: ReplicaSetup, name: str, logs: Path, devices: str | None, say: Say
    ) -> ServerProcess:
        """A server whose workers have our extension, and whose key comes by the environment."""
        code = logs / "code"  # apart: our packages must not come before those of the server's own interpreter
        code.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(worker.__file__, code / "vllm_worker.py")
        extension = ["--worker-extension-cls", "vllm_worker.WeightReader"]
        route = ["--enable-scale-out"] if has_route_for_tokens(self.python(config)) else []
        nccl = OPTIONS if _by_nccl(config) else []
        options = [*extension, *route, *nccl, *vllm_options(config, setup.source, sees=setup.sees)]
        path = os.pathsep.join([str(code.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])])
        # Said also where there is none: the variable may hold a judge's key, which vLLM would then ask us for.
        key = os.environ.get(API_KEY_ENV) or ""
        environment = ENVIRONMENT | {"PYTHONPATH": path, "VLLM_API_KEY": key}
        if devices is None:
            environment |= {name: os.environ.get(name, value) for name, value in CPU_ENVIRONMENT.items()}
        else:
            environment["CUDA_VISIBLE_DEVICES"] = devices
        command, log = vllm_command(self.python(config), options), logs / f"{name.replace(' ', '_')}.log"
        return ServerProcess(name, command, log=log, environment=environment, say=say)

    def replica(
        self,
        config: Config,
        setup: ReplicaSetup,
        name: str,
        at: ServerProcess | str,
        model: str | None,
        sizes: Sizes,
    ) -> InferenceServer:
        """With the way that its weights take, where that is NCCL's."""
        server = super().replica(config, setup, name, at, model, sizes)
        if isinstance(server, VllmServer) and _by_nccl(config):
            server.transfer = Transfer()
        return server

    async def image_processor(self, config: Config, renderer: Renderer, say: Say) -> ImageProcessor | None:
        """The model's own, where the vLLM that is started takes images with token ids; one that runs is tried."""
        if self.keeps_weights(config):
            return renderer.images
        return await _image_processor(renderer, self.python(config), say)

    def updates(self, config: Config) -> frozenset[type[Update]]:
        """By NCCL all weights go as a stream."""
        return frozenset({FullWeights}) if _by_nccl(config) else super().updates(config)

    def check_settings(self, config: Config) -> None:
        """NCCL goes from the learner's GPU to others; what has no such way is refused."""
        super().check_settings(config)
        refuse_keep(config)
        if not _by_nccl(config):
            return
        why, devices = "", self.devices(config)
        if config.cluster != ONE_MACHINE:
            why = "samplers of a cluster take weights of its object store"
        elif config.learner.lora_rank:
            why = "an adapter is small and goes as a file"
        elif config.learner.processes > 1:
            why = "the weights of learner.processes are gathered through the CPU"
        elif not visible_gpus().usable or config.learner.device == "cpu":
            why = (
                f"the learner is on the CPU ({visible_gpus().none})"
                if not visible_gpus().usable
                else "the learner is on the CPU"
            )
        elif devices and len(",".join(filter(None, devices)).split(",")) >= len(visible_gpus().gpus):
            why = "a server would share the learner's GPU, which NCCL does not allow"
        if why:
            raise ConfigError(f"servers.transfer=nccl: {why}; leave it at files")


def _by_nccl(config: Config) -> bool:
    """Whether weights go over NCCL; only servers can be configured so."""
    return section(config, ServersConfig).transfer is WeightTransfer.nccl


async def _image_processor(renderer: Renderer, python: str, say: Say) -> ImageProcessor | None:
    if renderer.images is not None and not await asyncio.to_thread(has_route_for_tokens, python):
        say("the engine reads text only: its vLLM has no route for token ids with images, as 0.32 has")
        return None
    return renderer.images


def has_route_for_tokens(python: str) -> bool:
    """Whether the vLLM of an interpreter is new enough; nothing of it is imported."""
    seek = (
        "import importlib.util, pathlib, sys; spec = importlib.util.find_spec('vllm'); "
        "files = pathlib.Path(spec.origin).parent.glob('entrypoints/**/cli_args.py') if spec else (); "
        "sys.exit(not any('enable_scale_out' in file.read_text() for file in files))"
    )
    return subprocess.run([python, "-c", seek], stdin=subprocess.DEVNULL, check=False).returncode == 0


def vllm_options(config: Config, source: ModelSource, *, sees: bool = False) -> list[str]:
    """vLLM's command line; what the user adds comes last and wins."""
    engine, gpu = config.engine, bool(visible_gpus().gpus)
    options = [
        "--model", str(source.folder.resolve()), "--dtype", choose(config).precision.value, "--seed", str(config.seed),
        "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--enable-prefix-caching",
        "--disable-log-stats",  # counted for every step and request, and written where nobody looks
    ]  # fmt: skip
    options += ["--gpu-memory-utilization", str(engine.memory_fraction)] if gpu else CPU_OPTIONS
    options += ["--trust-remote-code"] if config.model.trust_remote_code else []
    options += AS_WE_SEE if sees else []
    servers = section(config, ServersConfig)
    options += ["--max-num-seqs", str(sequences_of_a_copy(engine, servers, gpus_for_sampler(config).gpus))]
    options += ["--stream-interval", str(STREAM_INTERVAL)]
    options += ["--enable-sleep-mode"] if engine.sleep and gpu else []
    if rank := config.learner.lora_rank:
        room = next((size for size in LORA_RANKS if size >= rank), None)
        if room is None:
            raise ConfigError(f"learner.lora_rank={rank}: vLLM takes adapters of rank {LORA_RANKS[-1]} at most")
        options += ["--enable-lora", "--max-lora-rank", str(room), "--max-loras", "2"]
    return [*options, *servers.options]
