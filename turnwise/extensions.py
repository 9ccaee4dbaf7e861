"""The one table between the core and its guests: what each extension brings, by name; nothing is imported.

A guest is loaded when something of it is first named. Other packages bring theirs by an entry point of the group
`turnwise.extensions` whose value is an `Extension` (examples/extension is one).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points

from turnwise.errors import PluginError, one_line

GROUP = "turnwise.extensions"


@dataclass(frozen=True, slots=True)
class Engine:
    """What a sampler can do, known before anything of it is imported: `Engine("My sampler.", "mine:MyOpener")`."""

    about: str
    """What `turnwise config engine.name` says of it."""
    opener: str
    """`module:Class`, an `engines.opener.Opener`."""
    renders: bool = True
    """Prompts are rendered and tokens counted on our side; an endpoint does that on its own."""
    trains: bool = True
    """It gives log-probs and takes weights."""
    device: str = "own"
    """Where it computes the model: with our code in this process ("auto", "cpu", "cuda"), by itself ("own"), or ""
    where it has none."""
    reads: tuple[str, ...] = ()
    """Keys of the config that are read only by engines which name them here."""

    @property
    def here(self) -> bool:
        """Whether our own code computes the model in this process."""
        return self.device in ("auto", "cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Named:
    """What a knob of the core names: `Named("mine:Tracker", "Our dashboard.")`."""

    place: str
    """`module:object`."""
    about: str
    """What `turnwise config` says of it."""
    here: bool = False
    """It contacts nothing outside: a run from somebody else may name it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """What one guest brings; each value is `module:object`, or a module where the thing is a module (loops, verbs).

    A verb's module has HELP, add_arguments(parser), run(args), and in GROUP the title it stands under in the help.
    """

    tools: Mapping[str, str] = field(default_factory=dict)
    tool_entries: Mapping[str, str] = field(default_factory=dict)
    """By the key that an entry of a tools file has: what makes tools of the entry."""
    loops: Mapping[str, str] = field(default_factory=dict)
    """A bare name instead of `module:object` is another name of a loop of ours."""
    players: Mapping[str, str] = field(default_factory=dict)
    """By a key of its section: the loop that plays rows which name none, once that key is set."""
    loop_files: Mapping[str, str] = field(default_factory=dict)
    """By a key of its section, which takes a file that names loops: (config) -> a LoopEntry for each name."""
    users: Mapping[str, str] = field(default_factory=dict)
    user_files: Mapping[str, str] = field(default_factory=dict)
    """By a key of its section, which takes a file that names users: (config) -> what makes the User of each name."""
    scorers: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    """The scorer of a data source that neither the config nor a task covers; `aime*` is each that begins so."""
    truths: Mapping[str, str] = field(default_factory=dict)
    """By scorer: (its options) -> what reads a sample's ground truth, asked of every sample before a run, or None."""
    tasks: Mapping[str, str] = field(default_factory=dict)
    """A name that ends with `*` is a family: its object makes a Task of what follows (`task=verifiers:ENV`)."""
    models: Mapping[str, str] = field(default_factory=dict)
    demonstrations: Mapping[str, str] = field(default_factory=dict)
    """By a key of its section: once it is set, what a fine-tuning learns from, (config, student, note) ->
    Demonstrations."""
    held_out: Mapping[str, str] = field(default_factory=dict)
    """The same of what is not learned: its loss is measured while the others are."""
    unlearned: Mapping[str, str] = field(default_factory=dict)
    """By a key of its section: once it is set, (config, trajectory) -> the turns that are not learned."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """By a column of rows that have no `prompt`: (columns) -> the same with one."""
    trackers: Mapping[str, Named] = field(default_factory=dict)
    engines: Mapping[str, Engine] = field(default_factory=dict)
    learners: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, Named] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    """By variable (`WANDB_*` is a family): the module asked when one is set, a `VariablesOfExtension`."""
    model_variables: tuple[str, ...] = ()
    """Variables that name the model, where no config does."""
    verbs: Mapping[str, str] = field(default_factory=dict)
    checks: Mapping[str, str] = field(default_factory=dict)
    """What `turnwise check NAME` runs: (config) -> a text that is printed and what --json adds."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """What a run starts beside itself: (config, folder of runs, command) -> a context manager with a `note`."""
    keys_of_options: Mapping[str, str] = field(default_factory=dict)
    """By the start of a key below `scoring.options`: where the key of an address in it belongs (`key_in` of a knob)."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """By kind (tool, tool_module, loop, loop_module, user, scorer, batch_scorer, dataset, conversation):
    (value, entry) -> ours, or None of an object it does not know."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Public names of `turnwise` that are the extension's."""
    imports: str | None = None
    """A module with `importing()`, a context to import users' files in, and `advice(error, place)` where that fails."""
    reaches: tuple[str, ...] = ()
    """Names it brings, and keys of a row's extra_info, that lead to code or an address: a sent run needs trust."""
    configs: Mapping[str, str] = field(default_factory=dict)
    """Configs of other systems: `turnwise check --from-NAME FILE` is (file, overrides) -> what it composes as ours."""
    keys: str | None = None
    """A YAML file, `package:file`, of other systems' keys with what stands for them here: the answer to such a key."""
    section: str | None = None
    """The dataclass of its options, `module:Class`; in the config the section is called like the extension."""


_COMMON = ("model.precision", "engine.max_batch", "engine.sleep")
_IN_PROCESS = (*_COMMON, "engine.batch_invariant")
_ENGINES_OF_OTHERS = (*_COMMON, "engine.memory_fraction", "engine.retries", "servers.options")
_SERVER = (*_ENGINES_OF_OTHERS, "servers.addresses", "servers.replicas", "servers.python")

OWN = Engine("", "turnwise.engines.samplers.plugin:PluginOpener", reads=("engine.threads", "engine.retries"))
"""A sampler of the user's, `module:Class` or `file.py:Class`."""

OURS = {
    "turnwise": Extension(
        engines={
            "auto": Engine(
                "`cuda` where PyTorch sees a GPU, else `torch`; the plan says which.",
                "turnwise.engines.open_in_process:InProcessOpener",
                device="auto",
                reads=(*_IN_PROCESS, "engine.memory_fraction", "engine.threads"),
            ),
            "torch": Engine(
                "Turnwise's own sampler, in this process on the CPU; it gives the log-probs that training needs.",
                "turnwise.engines.open_in_process:InProcessOpener",
                device="cpu",
                reads=(*_IN_PROCESS, "engine.threads"),
            ),
            "cuda": Engine(
                "Turnwise's own sampler, in this process on one NVIDIA GPU, which it can share with the learner.",
                "turnwise.engines.open_in_process:InProcessOpener",
                device="cuda",
                reads=(*_IN_PROCESS, "engine.memory_fraction"),
            ),
            "openai": Engine(
                "An OpenAI-compatible endpoint; evaluation only.",
                "turnwise.engines.samplers.endpoint:EndpointOpener",
                renders=False,
                trains=False,
                device="",
                reads=("engine.base_url", "engine.model", "engine.timeout_seconds", "engine.retries"),
            ),
            "scripted": Engine(
                "Lines from `engine.script`: no model; for trying out tools, users and scorers.",
                "turnwise.engines.samplers.scripted:ScriptedOpener",
                trains=False,
                device="",
                reads=("engine.script",),
            ),
        }
    ),
    "board": Extension(
        verbs={
            "board": "turnwise.ext.board.command",
            "report": "turnwise.ext.board.report_command",
            "note": "turnwise.ext.board.note_command",
        },
        beside={"board": "turnwise.ext.board.board_process:beside_run"},
        section="turnwise.ext.board.config:BoardConfig",
    ),
    "conversations": Extension(
        demonstrations={"conversations.files": "turnwise.ext.conversations.demonstrations:read_conversations"},
        held_out={"conversations.eval_files": "turnwise.ext.conversations.demonstrations:read_held_out"},
        unlearned={
            "conversations.last_turn_only": "turnwise.ext.conversations.left_out:all_but_the_last",
            "conversations.leave_out_failed_calls": "turnwise.ext.conversations.left_out:with_failed_calls",
        },
        prompts=dict.fromkeys(
            ("messages", "conversations", "instruction"), "turnwise.ext.conversations.rows:with_prompt"
        ),
        section="turnwise.ext.conversations.config:ConversationsConfig",
    ),
    "fsdp": Extension(learners={"sharded": "turnwise.ext.fsdp.opening"}, section="turnwise.ext.fsdp.config:FsdpConfig"),
    "gym": Extension(loops={"gym_env": "turnwise.ext.gym.loop:gym_env"}),
    "http_env": Extension(
        loops={"http_env": "turnwise.ext.http_env.loop:http_env"}, tasks={"chat_env": "turnwise.ext.http_env.task:TASK"}
    ),
    "judge": Extension(
        scorers={"judge": "turnwise.ext.judge.scorer:judge", "tapo": "turnwise.ext.judge.tapo:tapo"},
        truths={"judge": "turnwise.ext.judge.scorer:truth_reader", "tapo": "turnwise.ext.judge.tapo:compared_truths"},
        verbs={"judge": "turnwise.ext.judge.command"},
        environment={"LLM_AS_A_JUDGE_BASE": "turnwise.ext.judge.environment"},
    ),
    "llm_user": Extension(users={"llm_user": "turnwise.ext.llm_user.user:LlmUser"}),
    "mcp": Extension(tool_entries={"mcp": "turnwise.ext.mcp.tools:open_mcp_tools"}),
    "ray": Extension(
        places={
            "ray": Named(
                "turnwise.ext.ray.placement:RayPlacement",
                "In actors of a Ray cluster, on all its nodes (docs/ext/ray.md).",
            )
        },
        section="turnwise.ext.ray.config:RayConfig",
    ),
    "research": Extension(
        tools={
            "retrieve": "turnwise.ext.research.tools.retrieve:retrieve",
            "search": "turnwise.ext.research.tools.search:search",
        },
        scorers={"cited_answer": "turnwise.ext.research.scoring:cited_answer"},
        tasks={"deep_research": "turnwise.ext.research.task:TASK"},
        reaches=("retrieve",),
    ),
    "sandbox": Extension(
        tools={
            "python": "turnwise.ext.sandbox.python_tool:python",
            "code_interpreter": "turnwise.ext.sandbox.python_tool:code_interpreter",
        },
        keys_of_options={"scoring.options.code_tests": "set TURNWISE_SANDBOX_TOKEN"},
        scorers={"code_tests": "turnwise.ext.sandbox.scoring.code_tests:code_tests"},
        sources=dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), "code_tests"),
        truths={"code_tests": "turnwise.ext.sandbox.scoring.cases:truth_reader"},
        verbs={"sandbox": "turnwise.ext.sandbox.command"},
        checks={"sandbox": "turnwise.ext.sandbox.command:check"},
        section="turnwise.ext.sandbox.config:SandboxConfig",
    ),
    "servers": Extension(section="turnwise.ext.servers.config:ServersConfig"),
    "sdk_agents": Extension(
        loops={"openai_client": "turnwise.ext.sdk_agents.loop:openai_client"},
        players={"sdk_agents.client": "openai_client"},
        section="turnwise.ext.sdk_agents.config:SdkAgentsConfig",
    ),
    "serving": Extension(verbs={"serve": "turnwise.ext.serving.command"}),
    "sglang": Extension(
        engines={
            "sglang_server": Engine(
                "SGLang servers: started here, in an environment of their own, or attached to.",
                "turnwise.ext.sglang.opener:SglangServers",
                reads=_SERVER,
            )
        }
    ),
    "swe": Extension(
        tools={
            name: f"turnwise.ext.swe.tools:{name}"
            for name in ("bash", "edit", "execute_bash", "finish", "str_replace_editor")
        },
        keys_of_options={"scoring.options.swe_tests": "set TURNWISE_SANDBOX_TOKEN"},
        scorers={"swe_tests": "turnwise.ext.swe.scoring:swe_tests"},
        tasks={"swe": "turnwise.ext.swe.task:TASK"},
        verbs={"swe": "turnwise.ext.swe.command"},
        checks={"swe": "turnwise.ext.swe.command:check"},
        section="turnwise.ext.swe.config:SweConfig",
    ),
    "tinylook": Extension(
        tools={"look": "turnwise.ext.tinylook.look:look"},
        tasks={"tinylook": "turnwise.ext.tinylook:TASK"},
        models={"tiny_vision": "turnwise.ext.tinylook.model"},
    ),
    "trackers": Extension(
        trackers={
            "tensorboard": Named("turnwise.ext.trackers.tensorboard:TensorboardTracker", "Event files.", here=True),
            "wandb": Named("turnwise.ext.trackers.wandb:WandbTracker", "Weights & Biases."),
            "mlflow": Named("turnwise.ext.trackers.mlflow:MlflowTracker", "MLflow."),
        },
        environment={"WANDB_*": "turnwise.ext.trackers.environment"},
        section="turnwise.ext.trackers.config:TrackersConfig",
    ),
    "trl": Extension(
        adapters={
            "scorer": "turnwise.ext.trl.rewards:scorer",
            "batch_scorer": "turnwise.ext.trl.rewards:batch_scorer",
            "tool": "turnwise.ext.trl.tools:tool",
        }
    ),
    "verifiers": Extension(
        tasks={"verifiers:*": "turnwise.ext.verifiers.task:environment_task"}, reaches=("verifiers",)
    ),
    "verl": Extension(
        imports="turnwise.ext.verl.imports",
        names={"BaseInteraction": "turnwise.ext.verl.users:BaseInteraction"},
        loops={"single_turn_agent": "single_turn", "tool_agent": "tool_calling"},
        loop_files={"verl.agents_file": "turnwise.ext.verl.adapters:loops_of_file"},
        user_files={"verl.interactions_file": "turnwise.ext.verl.adapters:users_of_file"},
        scorers={name: f"turnwise.ext.verl.rewards:{name}" for name in ("loop_reward", "verl_default")},
        sources=dict.fromkeys(
            ("math_dapo", "math", "math_dapo_reasoning", "hiyouga/geometry3k", "aime*"), "verl_default"
        ),
        truths={"verl_default": "turnwise.ext.verl.rewards:truth_reader"},
        adapters={
            **{kind: f"turnwise.ext.verl.adapters:{kind}" for kind in ("tool", "tool_module", "conversation")},
            **{kind: f"turnwise.ext.verl.adapters:{kind}" for kind in ("loop", "loop_module", "user")},
            "scorer": "turnwise.ext.verl.rewards:scorer",
            "batch_scorer": "turnwise.ext.verl.rewards:batch_scorer",
            "dataset": "turnwise.ext.verl.datasets:dataset",
        },
        verbs={"import-jsonl": "turnwise.ext.verl.import_command"},
        configs={"verl": "turnwise.ext.verl.translation.translate:compose_foreign"},
        keys="turnwise.ext.verl:keys.yaml",
        section="turnwise.ext.verl.config:VerlConfig",
    ),
    "vllm": Extension(
        engines={
            "vllm": Engine(
                "vLLM in this process; it gets the new weights after each step. Needs vLLM in Turnwise's environment.",
                "turnwise.ext.vllm.opener:VllmHere",
                reads=_ENGINES_OF_OTHERS,
            ),
            "vllm_server": Engine(
                "vLLM servers: started here, in an environment of their own, or attached to.",
                "turnwise.ext.vllm.opener:VllmServers",
                reads=(*_SERVER, "engine.model", "servers.transfer"),
            ),
        },
        model_variables=("VLLM_MODEL_PATH",),
    ),
    "weights": Extension(verbs={"weights": "turnwise.ext.weights.command"}),
}


@cache
def others() -> dict[str, tuple[Extension, str]]:
    """The extensions of other installed packages by name, each with what pip calls its package."""
    records: dict[str, tuple[Extension, str]] = {}
    for entry in entry_points(group=GROUP):
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "?"
        problem = "a built-in extension has this name" if entry.name in OURS else ""
        try:
            record = entry.load()
            if not isinstance(record, Extension):
                problem = f"{entry.value} is a {type(record).__name__}, not an Extension"
        except Exception as error:  # another package's code, run before anything else
            problem = f"{entry.value} cannot be loaded: {one_line(error)}"
        if problem or entry.name in records:
            problem = problem or f"{records[entry.name][1]} has an extension of that name"
            raise PluginError(f"the extension {entry.name!r} of the package {package}: {problem}; fix or uninstall it")
        records[entry.name] = record, package
    return records


def extensions() -> dict[str, Extension]:
    """Ours, and those of other installed packages, by name."""
    return OURS | {name: record for name, (record, _) in others().items()}


def named(kind: str, own: Iterable[str] = ()) -> dict[str, str]:
    """What extensions bring of a kind (a field of Extension), by its bare name; `own` are names that the core has."""
    brought: dict[str, str] = {}
    bringer = dict.fromkeys(own, "Turnwise itself")
    for extension, record in extensions().items():
        for name, spec in getattr(record, kind).items():
            if name in bringer:
                package = f" of the package {others()[extension][1]}" if extension in others() else ""
                problem = f"{name!r} in its {kind} is already used by {bringer[name]}: rename or uninstall it"
                raise PluginError(f"the extension {extension!r}{package}: {problem}")
            brought[name], bringer[name] = spec, f"the extension {extension!r}"
    return brought


def rows(kind: str, own: Iterable[str] = ()) -> dict[str, Named]:
    """The trackers or places that extensions bring, by name."""
    named(kind, own)  # which refuses a name that is taken
    return {name: row for record in extensions().values() for name, row in getattr(record, kind).items()}


def import_hooks() -> list[str]:
    """The modules that take part in importing users' files."""
    return [extension.imports for extension in extensions().values() if extension.imports is not None]


def engines() -> dict[str, Engine]:
    """Every engine that has a name."""
    named("engines")  # which refuses a name that is taken
    return {name: engine for extension in extensions().values() for name, engine in extension.engines.items()}


def engine(name: str) -> Engine:
    """The engine of a name, or the user's own; a config whose name is neither is refused when it is read."""
    return engines().get(name, OWN)


def reaching() -> frozenset[str]:
    """Names that extensions bring, and keys of rows, by which code or an address is reached."""
    return frozenset(name for extension in extensions().values() for name in extension.reaches)


def adapters(kind: str) -> Iterator[str]:
    """What makes ours of foreign objects of a kind, in the order of the table."""
    for extension in extensions().values():
        if kind in extension.adapters:
            yield extension.adapters[kind]
