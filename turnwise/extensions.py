"""What an extension may bring, and the one way from the core to its guests: by name.

The guests that ship with Turnwise stand in `ext/table.py`; each is loaded when something of it is first named. Other
packages bring theirs by an entry point of the group `turnwise.extensions` whose value is an `Extension`
(examples/extension is one).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
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
    """A name that ends with `*` is a family: its object makes a Task of what follows (`task=acme:ROOMS`)."""
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
    """By variable (`ACME_*` is a family): the module asked when one is set, a `VariablesOfExtension`."""
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


_IN_PROCESS = ("model.precision", "engine.max_batch", "engine.sleep", "engine.batch_invariant")

PLUGIN_ENGINE = Engine("", "turnwise.engines.samplers.plugin:PluginOpener", reads=("engine.threads", "engine.retries"))
"""A sampler of the user's, `module:Class` or `file.py:Class`."""

CORE = Extension(
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
)


def ours() -> dict[str, Extension]:
    """What ships with Turnwise."""
    return {"turnwise": CORE, **import_module("turnwise.ext.table").OURS}


@cache
def others() -> dict[str, tuple[Extension, str]]:
    """The extensions of other installed packages by name, each with what pip calls its package."""
    records: dict[str, tuple[Extension, str]] = {}
    for entry in entry_points(group=GROUP):
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "?"
        problem = "a built-in extension has this name" if entry.name in ours() else ""
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
    return ours() | {name: record for name, (record, _) in others().items()}


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
    return engines().get(name, PLUGIN_ENGINE)


def reaching() -> frozenset[str]:
    """Names that extensions bring, and keys of rows, by which code or an address is reached."""
    return frozenset(name for extension in extensions().values() for name in extension.reaches)


def adapters(kind: str) -> Iterator[str]:
    """What makes ours of foreign objects of a kind, in the order of the table."""
    for extension in extensions().values():
        if kind in extension.adapters:
            yield extension.adapters[kind]
