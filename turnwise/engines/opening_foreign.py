"""Opens vLLM and SGLang: in this process, as servers that we start, or as servers that run already."""

import asyncio
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import httpx

from turnwise.addresses import is_loopback
from turnwise.chat.renderer import Renderer
from turnwise.chat.vision import ImageProcessor
from turnwise.choices import ClusterName, EngineName, WeightTransfer
from turnwise.concurrency import gather_all
from turnwise.config import Config, EngineConfig
from turnwise.engines.devices import choose, look
from turnwise.engines.model.checkpoint_format import read_raw_config
from turnwise.engines.model.sources import ModelSource
from turnwise.engines.opened import OpenSampler, Say, model_source, small_picture
from turnwise.engines.opening_own import vocabulary_of
from turnwise.engines.samplers import vllm_worker
from turnwise.engines.samplers.in_flight import DecodeText
from turnwise.engines.samplers.inference_server import InferenceServer
from turnwise.engines.samplers.nccl_transfer import OPTIONS, Transfer
from turnwise.engines.samplers.replicas import Replica, Replicas
from turnwise.engines.samplers.same_model import sizes_of
from turnwise.engines.samplers.sampler import Capabilities, Logprobs
from turnwise.engines.samplers.server_client import ServerClient, server_address
from turnwise.engines.samplers.server_process import ServerProcess
from turnwise.engines.samplers.sglang_server import SCALING, SglangServer, sglang_command
from turnwise.engines.samplers.vllm_engine import VllmEngine
from turnwise.engines.samplers.vllm_server import AS_WE_SEE, VllmServer, vllm_command
from turnwise.engines.server_gpus import devices_of, named_options
from turnwise.engines.updates import Adapter, FullWeights, WeightsFolder
from turnwise.errors import ConfigError, EngineError
from turnwise.own_folder import OwnFolder
from turnwise.sandbox.resources import raise_descriptors
from turnwise.storage.run_dir import SERVERS, run_folder

API_KEY_ENV = "TURNWISE_ENGINE_KEY"
"""The environment variable that holds the key of servers that want one."""
CHECK_SECONDS = 20.0
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""That vLLM has room made for."""
PACKAGES = {EngineName.vllm: "vllm", EngineName.vllm_server: "vllm", EngineName.sglang_server: "sglang"}
VLLM_ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
CPU_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "2"}
"""Several servers and a learner share the cores and the memory; said where the environment does not say otherwise."""
_OURS = (
    "--host", "--port", "--model", "--model-path", "--served-model-name", "--logprobs-mode", "--worker-extension-cls",
)  # fmt: skip
_SECRETS = ("--api-key", "--admin-api-key", "--hf-token")
CPU_OPTIONS = ["--enforce-eager", "--no-enable-chunked-prefill"]


async def open_foreign(config: Config, renderer: Renderer, say: Say) -> OpenSampler:
    """The sampler of `engine=vllm`, `vllm_server` or `sglang_server`; all of its replicas are up."""
    from turnwise.engines.samplers.threads import usable_cores

    check_settings(config)
    raise_descriptors()  # every turn under way is a connection
    source, capabilities = model_source(config), _capabilities(config)
    decode = renderer.tokenizer.decode
    vocabulary = vocabulary_of(source, renderer.tokenizer.vocab_size)
    replicas: list[VllmEngine | InferenceServer]
    images = renderer.images if config.engine.name != EngineName.sglang_server else None
    if images is not None and not config.engine.servers and not await _reads_images(_python(config)):
        say("the engine reads text only: its vLLM has no route for token ids with images, as 0.32 has")
        images = None
    if config.engine.name == EngineName.vllm:
        for name, value in {**(CPU_ENVIRONMENT if not look().gpus else {}), "VLLM_LOGGING_LEVEL": "WARNING"}.items():
            os.environ.setdefault(name, value)
        options = _options(config, source, sees=images is not None)
        replicas = [VllmEngine(options, vocabulary=vocabulary, decode=decode, capabilities=capabilities)]
    else:
        sees = images is not None
        replicas = _servers(config, source, capabilities, say, vocabulary=vocabulary, decode=decode, sees=sees)
    try:
        await gather_all(one.start() for one in replicas)
        for one in replicas:
            if isinstance(one, SglangServer):
                one.refuse_unscaled(config.sampling.temperature)
        if images is not None:
            await _try_images(replicas, images, say)
        sampler = Replicas(list[Replica](replicas), say)
    except BaseException:
        await asyncio.shield(asyncio.gather(*(one.close() for one in replicas), return_exceptions=True))
        raise
    say(f"{config.engine.name}: {sampler.capabilities}; that its tokens do not depend on batching is not proven")
    return OpenSampler(sampler, usable_cores())


async def _reads_images(python: str) -> bool:
    """Whether the vLLM of an interpreter is new enough; nothing of it is imported."""
    seek = (
        "import importlib.util, pathlib, sys; found = importlib.util.find_spec('vllm'); "
        "places = pathlib.Path(found.origin).parent.glob('entrypoints/**/cli_args.py') if found else (); "
        "sys.exit(not any('enable_scale_out' in one.read_text() for one in places))"
    )
    process = await asyncio.create_subprocess_exec(python, "-c", seek, stdin=asyncio.subprocess.DEVNULL)
    return await process.wait() == 0


async def _try_images(replicas: Sequence[VllmEngine | InferenceServer], images: ImageProcessor, say: Say) -> None:
    """Show each a small picture before anyone shows it one; what makes something of its own of it reads text only."""
    picture = await asyncio.to_thread(images.prepare, small_picture())
    found = await gather_all(one.try_image(images.image_token_id, picture) for one in replicas)
    if problems := [problem for problem in found if problem is not None]:
        say(f"the engine reads text only: {problems[0]}")
        for one in replicas:  # a conversation may come to any of them
            one.capabilities = replace(one.capabilities, media=False)


def check_settings(config: Config) -> None:
    """Refuse what cannot be opened, before anything is."""
    engine = config.engine
    if model_source(config).gguf_file is not None:
        raise ConfigError(
            f"engine={engine.name} reads a Hugging Face folder, and model.path={config.model.path} is none"
        )
    if engine.servers and engine.replicas > 1:
        raise ConfigError(f"engine.replicas={engine.replicas} are started where engine.servers names none to attach to")
    addresses = [server_address(url) for url in engine.servers]
    if len(set(addresses)) < len(addresses):  # one would load weights under the turns of the other
        raise ConfigError(f"engine.servers names a server twice: {', '.join(addresses)}")
    _refuse_idle(engine)
    _refuse_options(engine)
    _check_transfer(config)
    if engine.python is not None and shutil.which(os.path.expanduser(engine.python)) is None:
        raise ConfigError(f"engine.python={engine.python}: there is no such program")
    if not engine.servers:
        devices_of(config, engine.replicas)


def _refuse_idle(engine: EngineConfig) -> None:
    """What says how servers are started has no effect on those that run, nor a name of theirs on those we start."""
    started = {"engine.python": engine.python, "engine.server_options": engine.server_options}
    for name, value in started.items() if engine.servers else ():
        if value:
            raise ConfigError(f"{name}={value} is for servers that are started, and engine.servers names some that run")
    if engine.model is not None and not engine.servers:
        raise ConfigError(
            f"engine.model={engine.model} chooses of what servers that run serve; engine.servers is empty"
        )


def _refuse_options(engine: EngineConfig) -> None:
    """What decides who is asked for what, and secrets: a command line is kept in the run's folder and in the server's
    log, and every process of the machine sees it."""
    for option, _ in named_options(engine.server_options):
        if option.replace("_", "-") in _OURS:
            raise ConfigError(
                f"engine.server_options: {option} is Turnwise's to say; with another one its tokens or "
                "log-probs would not be those that are asked for"
            )
        if option.replace("_", "-") in _SECRETS:
            raise ConfigError(
                f"engine.server_options: {option} would be kept in the run's folder and be seen by every process of "
                f"this machine; put a key of the servers into {API_KEY_ENV}, one of the Hugging Face hub into HF_TOKEN"
            )


def _by_nccl(config: Config) -> bool:
    return config.engine.name == EngineName.vllm_server and config.engine.transfer is WeightTransfer.nccl


def _check_transfer(config: Config) -> None:
    """NCCL goes from the learner's GPU to others; what has no such way is refused."""
    if not _by_nccl(config):
        return
    why, given = "", devices_of(config, config.engine.replicas)
    if config.cluster.name is not ClusterName.none:
        why = "samplers of a cluster take weights of its object store"
    elif config.learner.lora_rank:
        why = "an adapter is small and goes as a file"
    elif config.learner.processes > 1:
        why = "the weights of learner.processes are gathered through the CPU"
    elif not look().usable or config.learner.device == "cpu":
        why = f"the learner is on the CPU ({look().none})" if not look().usable else "the learner is on the CPU"
    elif not config.engine.servers and len(",".join(filter(None, given)).split(",")) >= len(look().gpus):
        why = "a server would share the learner's GPU, which NCCL does not allow"
    if why:
        raise ConfigError(f"engine.transfer=nccl: {why}; leave it at files")


async def check_foreign(config: Config) -> str:
    """What is there: servers that answer, or the package in its interpreter; ConfigError when it is not."""
    check_settings(config)
    engine, package = config.engine, PACKAGES[EngineName(config.engine.name)]
    if engine.servers:
        for url in engine.servers:
            client = ServerClient(url, os.environ.get(API_KEY_ENV))
            try:
                await client.ask("GET", "/health", seconds=CHECK_SECONDS)
            except EngineError as error:
                raise ConfigError(f"engine.servers: {url} does not serve: {error}") from error
            finally:
                await client.close()
        await _check_attached(config)
        return f"{len(engine.servers)} server(s) answer, with the model of model.path and all that is asked of them"
    python = _python(config)
    seek = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    process = await asyncio.create_subprocess_exec(python, "-c", seek, stdin=asyncio.subprocess.DEVNULL)
    if await process.wait():
        mend = (
            "install it beside Turnwise" if engine.name == EngineName.vllm else "name one that has it in engine.python"
        )
        raise ConfigError(f"engine={engine.name}: {python} has no package {package}; {mend} (docs/engines.md)")
    return f"{python} has {package}"


async def _check_attached(config: Config) -> None:
    """What a run would refuse of servers that run, another model among it; they are given nothing."""
    source = model_source(config)
    servers = _servers(
        config, source, _capabilities(config), lambda text: None,
        vocabulary=vocabulary_of(source, 1), decode=lambda ids: "", sees=False,
    )  # fmt: skip
    for server in servers:
        try:
            await server.start()
        except EngineError as error:
            raise ConfigError(f"engine.servers: {error}") from error
        finally:
            await server.close()


def shared_place(config: Config) -> Path | None:
    """A folder of weights that servers on other machines see: with the runs, which then lie on a shared disk."""
    apart = [url for url in config.engine.servers if not is_loopback(httpx.URL(url).host)]
    return Path(config.runs_dir).resolve() / ".weights" if apart else None


def _capabilities(config: Config) -> Capabilities:
    filtered = config.sampling.top_p < 1.0 or config.sampling.top_k > 0
    sglang = config.engine.name == EngineName.sglang_server
    files = frozenset({WeightsFolder, Adapter} if config.learner.lora_rank else {WeightsFolder})
    return Capabilities(
        # vLLM's processed log-probs are those after the filters; SGLang's are of the scaled distribution itself.
        Logprobs.FILTERED if filtered and not sglang else Logprobs.SCALED,
        frozenset({FullWeights}) if _by_nccl(config) else files,
        # Of servers that run already: whether they can is theirs to say, and they are asked.
        sleeps=bool(config.engine.sleep) and (bool(config.engine.servers) or bool(look().gpus)),
    )


def _servers(
    config: Config,
    source: ModelSource,
    capabilities: Capabilities,
    say: Say,
    *,
    vocabulary: int,
    decode: DecodeText,
    sees: bool,
) -> list[VllmEngine | InferenceServer]:
    engine, key = config.engine, os.environ.get(API_KEY_ENV)
    kind = VllmServer if engine.name == EngineName.vllm_server else SglangServer
    sizes = sizes_of(read_raw_config(source.folder)) if engine.servers else {}

    def made(name: str, where: ServerProcess | str, model: str | None) -> InferenceServer:
        server = kind(
            name, where, vocabulary=vocabulary, decode=decode, capabilities=capabilities, api_key=key, model=model,
            sizes=sizes,
        )  # fmt: skip
        if isinstance(server, VllmServer) and _by_nccl(config):
            server.transfer = Transfer()
        return server

    if engine.servers:
        return [made(f"server {number} ({url})", url, engine.model) for number, url in enumerate(engine.servers)]
    logs = (
        run_folder() or OwnFolder("turnwise-servers-").path
    ) / SERVERS  # kept after us, for who reads them, but once
    processes = []
    for number, devices in enumerate(devices_of(config, engine.replicas)):
        environment = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
        environment |= SCALING if kind is SglangServer else {}
        command = sglang_command(_python(config), _sglang_options(config, source))
        if kind is VllmServer:
            code = logs / "code"  # apart: our packages must not come before those of the server's own interpreter
            code.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(vllm_worker.__file__, code / "vllm_worker.py")
            extension = ["--worker-extension-cls", "vllm_worker.WeightReader"]
            route = ["--enable-scale-out"] if sees else []  # that takes token ids and images
            command = vllm_command(_python(config), [*extension, *route, *_options(config, source, sees=sees)])
            path = os.pathsep.join([str(code.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])])
            # Said also where there is none: the variable may hold a judge's key, which vLLM would then ask us for.
            environment |= VLLM_ENVIRONMENT | {"PYTHONPATH": path, "VLLM_API_KEY": key or ""}
            if devices is None:
                environment |= {name: os.environ.get(name, value) for name, value in CPU_ENVIRONMENT.items()}
        name, log = f"server {number}", logs / f"server_{number}.log"
        processes.append(ServerProcess(name, command, log=log, environment=environment, say=say))
    return [made(process.name, process, "policy" if kind is VllmServer else None) for process in processes]


def _python(config: Config) -> str:
    return sys.executable if config.engine.python is None else os.path.expanduser(config.engine.python)


def _options(config: Config, source: ModelSource, *, sees: bool) -> list[str]:
    """vLLM's command line; what the user adds comes last and wins."""
    engine, gpu = config.engine, bool(look().gpus)
    found = [
        "--model", str(source.folder.resolve()), "--dtype", choose(config).precision.value, "--seed", str(config.seed),
        "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--enable-prefix-caching",
    ]  # fmt: skip
    # On a CPU vLLM dies of a request with a seed whose prompt it reads in parts: its generators have no offset there.
    found += ["--gpu-memory-utilization", str(engine.memory_fraction)] if gpu else CPU_OPTIONS
    found += ["--trust-remote-code"] if config.model.trust_remote_code else []
    found += AS_WE_SEE if sees else []
    found += ["--max-num-seqs", str(engine.max_batch)] if engine.max_batch else []
    found += ["--enable-sleep-mode"] if engine.sleep and gpu else []
    found += OPTIONS if _by_nccl(config) else []
    if rank := config.learner.lora_rank:
        room = next((one for one in LORA_RANKS if one >= rank), None)
        if room is None:
            raise ConfigError(f"learner.lora_rank={rank}: vLLM takes adapters of rank {LORA_RANKS[-1]} at most")
        found += ["--enable-lora", "--max-lora-rank", str(room), "--max-loras", "2"]
    return [*found, *engine.server_options]


def _sglang_options(config: Config, source: ModelSource) -> list[str]:
    """SGLang's command line; the same."""
    engine, gpu = config.engine, bool(look().gpus)
    found = [
        "--model-path", str(source.folder.resolve()), "--dtype", choose(config).precision.value,
        "--random-seed", str(config.seed), "--sampling-defaults", "openai",
    ]  # fmt: skip
    found += ["--mem-fraction-static", str(engine.memory_fraction)] if gpu else ["--device", "cpu"]
    found += ["--trust-remote-code"] if config.model.trust_remote_code else []
    found += ["--max-running-requests", str(engine.max_batch)] if engine.max_batch else []
    found += ["--enable-memory-saver"] if engine.sleep and gpu else []
    if rank := config.learner.lora_rank:
        found += ["--enable-lora", "--max-lora-rank", str(rank), "--lora-target-modules", "all"]
    return [*found, *engine.server_options]


def described(config: Config) -> str:
    """As the plan has it: `vllm_server, 2 started here by ~/vllm/bin/python`."""
    engine = config.engine
    if engine.name == EngineName.vllm:
        return "vllm, in this process"
    if engine.servers:
        return f"{engine.name}, attached to {', '.join(engine.servers)}"
    return f"{engine.name}, {engine.replicas} started here by {engine.python or 'this interpreter'}"
