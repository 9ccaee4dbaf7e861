"""Modules that need an extra say so in one line: imported, and started with `python -m`."""

import importlib
import runpy
import sys

import pytest

from turnwise.errors import ConfigError

SERVERS = {"turnwise.scoring.runners.server": "server", "turnwise.ext.research.corpus.retrieval_server": "server"}


@pytest.mark.parametrize("package", ["fastapi", "uvicorn"])
@pytest.mark.parametrize("module", SERVERS)
def test_a_server_names_its_extra(module: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (module, "turnwise.system.serving"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    words = f" needs {package}: pip install 'turnwise\\[{SERVERS[module]}\\]'$"
    with pytest.raises(SystemExit, match=words):
        runpy.run_module(module, run_name="__main__")
    with pytest.raises(ConfigError, match=words):
        importlib.import_module(module)
