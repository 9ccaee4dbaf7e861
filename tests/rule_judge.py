"""The judge of rules, loaded from examples/ as a user would run it."""

import importlib.util
import sys
from pathlib import Path

_PATH = Path(__file__).parents[1] / "examples" / "rule_judge" / "serve.py"
_SPEC = importlib.util.spec_from_file_location("rule_judge_serve", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
serve = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = serve  # where FastAPI looks for the types of its requests
_SPEC.loader.exec_module(serve)

MODEL, ChatRequest, NotOurs = serve.MODEL, serve.ChatRequest, serve.NotOurs
completion, make_app = serve.completion, serve.make_app
means_the_same, reply_to = serve.means_the_same, serve.reply_to
