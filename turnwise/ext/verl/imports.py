"""What a user's file gets when it imports verl: the real one where `import verl` works, else stand-ins for its parts.

The stand-ins (turnwise/ext/verl/stand_ins) are found under verl's names only while a plug-in loads, never instead of a
module that such a verl has; a checkout in the current folder without what verl needs is none. What neither has is
answered with what to write instead.
"""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from types import ModuleType

DOCS = "docs/ext/verl.md"
STAND_INS = "turnwise.ext.verl.stand_ins"
SERVED = {
    "": ("verl", "verl.workers", "verl.workers.rollout", "verl.experimental", "verl.trainer", "verl.trainer.ppo"),
    "data_proto": ("verl.protocol",),
    "tools": (
        "verl.tools", "verl.tools.base_tool", "verl.tools.schemas", "verl.tools.function_tool",
        "verl.tools.tool_registry", "verl.tools.utils", "verl.tools.utils.tool_registry",
    ),
    "builtin_tools": (
        "verl.tools.gsm8k_tool", "verl.tools.geo3k_tool", "verl.tools.search_tool", "verl.tools.sandbox_fusion_tools",
        "verl.tools.image_zoom_in_tool", "verl.tools.mcp_base_tool", "verl.tools.mcp_search_tool",
    ),
    "interactions": (
        "verl.interactions", "verl.interactions.base", "verl.interactions.utils",
        "verl.interactions.utils.interaction_registry", "verl.interactions.gsm8k_interaction",
        "verl.interactions.weather_interaction",
    ),
    "verl_utils": (
        "verl.utils", "verl.utils.rollout_trace", "verl.utils.fs", "verl.utils.tokenizer", "verl.utils.profiler",
        "verl.utils.profiler.performance", "verl.utils.ray_utils", "verl.experimental.agent_loop.utils",
    ),
    "tensors": ("verl.utils.torch_functional", "verl.utils.model"),
    "schemas": ("verl.workers.rollout.schemas",),
    "reward_score": ("verl.utils.reward_score", "verl.trainer.ppo.reward"),
    "rewards.gsm8k": ("verl.utils.reward_score.gsm8k",),
    "rewards.math": ("verl.utils.reward_score.math_reward",),
    "rewards.dapo": ("verl.utils.reward_score.math_dapo",),
    "rewards.geo3k": ("verl.utils.reward_score.geo3k",),
    "rewards.search": ("verl.utils.reward_score.search_r1_like_qa_em",),
    "dataset": ("verl.utils.dataset", "verl.utils.dataset.rl_dataset"),
    "agent_loop": (
        "verl.experimental.agent_loop", "verl.experimental.agent_loop.agent_loop", "verl.workers.rollout.replica",
    ),
    "tool_agent_loop": (
        "verl.experimental.agent_loop.tool_agent_loop", "verl.experimental.agent_loop.single_turn_agent_loop",
    ),
    "tool_parser": ("verl.experimental.agent_loop.tool_parser",),
    "reward_manager": (
        "verl.workers.reward_manager", "verl.workers.reward_manager.abstract", "verl.workers.reward_manager.registry",
        "verl.experimental.reward_loop", "verl.experimental.reward_loop.reward_manager",
        "verl.experimental.reward_loop.reward_manager.base", "verl.experimental.reward_loop.reward_manager.registry",
        "verl.experimental.reward", "verl.experimental.reward.reward_loop",
        "verl.experimental.reward.reward_loop.base", "verl.experimental.reward.reward_loop.registry",
    ),
}  # fmt: skip
"""Files of turnwise/ext/verl/stand_ins, and the modules of verl whose names they have."""
_TARGETS = {module: f"{STAND_INS}.{file}".removesuffix(".") for file, modules in SERVED.items() for module in modules}
INSTEAD = {
    "verl.interactions": "write `from turnwise import BaseInteraction`; the methods stay as they are",
    "verl.tools": "import BaseTool, the schemas and function_tool only, or write a typed function with @turnwise.tool",
    "verl.utils.reward_score.prime_math": "scoring.scorers={SOURCE: math} compares answers with math-verify",
    "verl.utils.reward_score.math_verify": "scoring.scorers={SOURCE: math} compares answers with math-verify",
    "verl.utils.reward_score.prime_code": "scoring.scorers={SOURCE: code_tests} runs tests in the sandbox",
    "verl.utils.reward_score.sandbox_fusion": "scoring.scorers={SOURCE: code_tests} runs tests in the sandbox",
    "verl.utils.reward_score": "keep your compute_score without it; scoring.scorers names the built-in scorers",
    "verl.experimental.agent_loop": "AgentLoopBase, ToolAgentLoop, AgentLoopOutput and register are there; "
    "a loop of ours is `async def loop(chat)`, named in rollout.agent as file.py:loop",
    "verl": "keep what you need of it in a file of your own, or install verl beside turnwise",
}
"""Advice by the start of a module's name, the longest first."""


class _StandIn(importlib.abc.Loader):
    """Makes a module under verl's name that holds the names of one of our files."""

    def __init__(self, target: str) -> None:
        self._target = target

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        target = importlib.import_module(self._target)
        public = {name: value for name, value in vars(target).items() if not name.startswith("_")}
        vars(module).update(public)
        if hasattr(target, "__getattr__"):
            vars(module)["__getattr__"] = target.__getattr__


class _First(importlib.abc.MetaPathFinder):
    """Finds the stand-ins where no verl can be imported: none is there, or a checkout without what it needs."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return None if fullname not in _TARGETS or _is_whole() else _spec(fullname)


class _Last(importlib.abc.MetaPathFinder):
    """Finds the stand-ins for what a real verl lacks (interactions, in 0.8 and later)."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return None if fullname not in _TARGETS or _trying else _spec(fullname)


def _spec(fullname: str) -> importlib.machinery.ModuleSpec:
    return importlib.machinery.ModuleSpec(fullname, _StandIn(_TARGETS[fullname]), is_package=True)


_first, _last = _First(), _Last()
_lock = threading.RLock()
_loading = 0
_trying = False
_whole: dict[str, bool] = {}
"""Whether a verl can be imported, by where it lies."""


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """While this is open, imports of verl find a verl that can be imported, and else the stand-ins.

    Where there is a real one, only what it lacks is ours. Afterwards no `verl` of ours is left in `sys.modules`: what a
    plug-in imported, it keeps.
    """
    global _loading
    with _lock:
        _loading += 1
        if _loading == 1:
            sys.meta_path.insert(0, _first)
            sys.meta_path.append(_last)
        try:
            yield
        finally:
            _loading -= 1
            if _loading == 0:
                sys.meta_path.remove(_first)
                sys.meta_path.remove(_last)
                _forget()


def _is_whole() -> bool:
    """Whether there is a verl whose package can be imported, or code that somebody else has put under its name."""
    global _trying
    if _trying or ("verl" in sys.modules and not _is_ours(sys.modules["verl"])):
        return True
    others = [finder for finder in sys.meta_path if finder not in (_first, _last) and hasattr(finder, "find_spec")]
    origins = [spec.origin for finder in others if (spec := finder.find_spec("verl", None)) is not None]
    location = next((origin for origin in origins if origin is not None), None)
    if location is None:  # a mere folder called verl would be taken for an empty package
        return False
    if location not in _whole:
        ours = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_verl(name)}
        _trying = True
        try:
            importlib.import_module("verl")
            _whole[location] = True
        except ImportError:  # a checkout, or an installation without what it needs
            _whole[location] = False
            for name in [name for name in sys.modules if _is_verl(name)]:
                del sys.modules[name]
        finally:
            _trying = False
            sys.modules.update(ours)
    return _whole[location]


def _forget() -> None:
    served = [name for name, module in sys.modules.items() if name in _TARGETS and _is_ours(module)]
    for name in served:
        module = sys.modules.pop(name)
        parent, _, last = name.rpartition(".")
        if getattr(sys.modules.get(parent), last, None) is module:  # a real verl got a part of ours
            delattr(sys.modules[parent], last)


def _is_ours(module: ModuleType) -> bool:
    return isinstance(getattr(getattr(module, "__spec__", None), "loader", None), _StandIn)


def advice(error: ImportError, place: str) -> str | None:
    """The line that imports verl, and what to write instead; None when nothing of verl's was missing.

    `place` is the file or module that was to be imported.
    """
    if not _is_verl(error.name or ""):
        return None
    if _is_verl(place) and not place.endswith(".py"):
        return f"verl is not installed; {instead(place)}"
    lacking = "which is not installed and has no stand-in here"
    if not isinstance(error, ModuleNotFoundError):  # the module is there, a name in it is not
        lacking = f"which has no such name here ({error.msg})"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        words = (frame.line or "").replace(",", " ").split()
        if words[:1] in (["from"], ["import"]) and _is_verl(words[1]):
            where = f"{frame.filename}, line {frame.lineno}: `{frame.line}`"
            return f"{where} needs {error.name}, {lacking}; {instead(words[1])}"
    return f"it needs {error.name}, {lacking}; {instead(str(error.name))}"


def instead(module: str) -> str:
    """What to write instead of using a module of verl's."""
    text = next(text for start, text in INSTEAD.items() if module == start or module.startswith(f"{start}."))
    return f"{text} ({DOCS})"


def _is_verl(module: str) -> bool:
    return module.split(".")[0] == "verl"
