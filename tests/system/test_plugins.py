"""Finding what users bring: by module or file, from any folder, and never a namesake by mistake."""

import signal
import subprocess
import sys

import pytest

from turnwise.errors import PluginError
from turnwise.system.plugins import builtin, load, names_in


@pytest.fixture(autouse=True)
def clean_imports(monkeypatch, tmp_path):
    """Each test has its own folder, path and modules."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(path, text="value = 1\n"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_three_ways_to_name_a_thing(tmp_path):
    write(tmp_path / "here" / "mine_a.py", "class Thing: pass\n")
    by_module = load("mine_a:Thing", "thing")
    assert by_module is load("mine_a.Thing", "thing")
    by_file = load("mine_a.py:Thing", "thing")
    assert by_file.__name__ == "Thing"
    assert by_file is load(f"{tmp_path}/here/mine_a.py:Thing", "thing"), "one file, one module"
    assert load("json:dumps", "thing") is __import__("json").dumps
    assert load("os.path.join", "thing") is __import__("os").path.join


def test_files_and_modules_beside_the_naming_file_are_found(tmp_path):
    write(tmp_path / "there" / "mine_b.py", "value = 2\n")
    write(tmp_path / "there" / "pack" / "deep.py", "value = 3\n")
    write(tmp_path / "there" / "pack" / "__init__.py", "")
    for spec, value in (("mine_b:value", 2), ("mine_b.py:value", 2), ("pack.deep:value", 3), ("pack/deep.py:value", 3)):
        with pytest.raises(PluginError):
            load(spec, "thing")
        assert load(spec, "thing", near=tmp_path / "there") == value
        sys.path[:] = [entry for entry in sys.path if str(tmp_path) not in entry]


def test_two_files_of_one_name_are_two_modules(tmp_path):
    write(tmp_path / "a" / "reward.py", "value = 'a'\n")
    write(tmp_path / "b" / "reward.py", "value = 'b'\n")
    write(tmp_path / "a_b" / "c.py", "value = 'a_b/c'\n")
    write(tmp_path / "a" / "b_c.py", "value = 'a/b_c'\n")
    for place, value in (("a/reward", "a"), ("b/reward", "b"), ("a_b/c", "a_b/c"), ("a/b_c", "a/b_c")):
        assert load(f"{tmp_path}/{place}.py:value", "thing") == value


def test_a_users_folder_does_not_shadow_installed_packages(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    write(tmp_path / "there" / "colorsys.py", "rgb_to_hsv = 'mine'\n")
    write(tmp_path / "there" / "mine_c.py", "import colorsys\nvalue = colorsys.rgb_to_hsv(0, 0, 0)\n")
    assert load("mine_c:value", "thing", near=tmp_path / "there") == (0.0, 0.0, 0)
    with pytest.raises(PluginError, match=r"colorsys is .*, not .*there/colorsys\.py; if that is meant, write"):
        load("colorsys:rgb_to_hsv", "thing", near=tmp_path / "there")
    assert load("colorsys.py:rgb_to_hsv", "thing", near=tmp_path / "there") == "mine"


def test_a_verl_of_the_users_own_folder_is_not_shadowed_by_the_stand_ins(tmp_path):
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl/__init__.py").write_text("")
    (tmp_path / "verl/own.py").write_text("VALUE = 7\n")
    (tmp_path / "beside_a_verl.py").write_text("from verl.own import VALUE\n")
    script = "from turnwise.system.plugins import load; print(load('beside_a_verl:VALUE', 'tool'))"
    ran = subprocess.run(
        [sys.executable, "-P", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.stdout == "7\n", ran.stderr


def test_a_checkout_of_verl_without_what_it_needs_gives_way_to_the_stand_ins(tmp_path):
    (tmp_path / "verl" / "tools").mkdir(parents=True)
    (tmp_path / "verl/__init__.py").write_text("from verl.tools import a_part\nimport not_installed_here\n")
    (tmp_path / "verl/tools/__init__.py").write_text("")
    (tmp_path / "verl/tools/a_part.py").write_text("")
    (tmp_path / "verl/tools/base_tool.py").write_text("import not_installed_here\n")
    (tmp_path / "in_a_checkout.py").write_text("from verl.tools.base_tool import BaseTool\n")
    script = (
        "import sys; from turnwise.system.plugins import load; tool = load('in_a_checkout:BaseTool', 'tool')\n"
        "print(tool.__module__, [name for name in sys.modules if name.split('.')[0] == 'verl'])\n"
        "print(load('verl.tools.gsm8k_tool.Gsm8kTool', 'tool').__name__)"
    )
    ran = subprocess.run(
        [sys.executable, "-P", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.stdout == "turnwise.ext.verl.stand_ins.tools []\nGsm8kTool\n", ran.stderr


def test_a_namesake_of_another_folder_is_not_taken_silently(tmp_path):
    write(tmp_path / "a" / "twin.py", "value = 'a'\n")
    write(tmp_path / "b" / "twin.py", "value = 'b'\n")
    assert load("twin:value", "thing", near=tmp_path / "a") == "a"
    with pytest.raises(PluginError, match=r"twin is .*a/twin\.py, not .*b/twin\.py; .*b/twin\.py:value"):
        load("twin:value", "thing", near=tmp_path / "b")


@pytest.mark.parametrize("spec", ["", "name", ":name", "module:", "reward.py", "folder/reward.py", ".name"])
def test_what_is_no_name_is_told_how_to_write_one(spec):
    with pytest.raises(PluginError, match="write module:name, file.py:name or package.module.Class"):
        load(spec, "scorer")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import nowhere_at_all\n", "nowhere_at_all"),
        ("1/0\n", "ZeroDivisionError"),
        ("def (\n", "SyntaxError"),
        ("import sys; sys.exit(3)\n", "SystemExit: 3"),
        ("from os import nothing_there\n", "ImportError"),
    ],
)
def test_code_that_fails_says_why(tmp_path, text, words):
    write(tmp_path / "here" / "mine_d.py", text)
    for spec in ("mine_d:value", "mine_d.py:value"):
        with pytest.raises(PluginError, match=words) as caught:
            load(spec, "scorer")
        assert str(caught.value).startswith(f"scorer {spec!r}: ")
    write(tmp_path / "here" / "mine_d.py", "value = 'mended'\n")
    assert load("mine_d.py:value", "scorer") == "mended", "a failed file is not remembered"


def test_missing_things_say_what_was_tried(tmp_path):
    write(tmp_path / "here" / "mine_e.py", "reward = 1\n_hidden = 2\n")
    with pytest.raises(PluginError, match="mine_e has no 'rewrad': did you mean 'reward'"):
        load("mine_e:rewrad", "scorer")
    with pytest.raises(PluginError, match="no module 'absent' among installed ones or in .*here"):
        load("absent.deep:x", "scorer")
    with pytest.raises(PluginError, match="no module 'mine_e.deep'"):
        load("mine_e.deep:x", "scorer")
    with pytest.raises(PluginError, match=r"no such file; tried .*there/x\.py, .*here/x\.py"):
        load("x.py:y", "scorer", near=tmp_path / "there")


def test_the_folder_is_the_registry():
    assert {"single_turn", "tool_calling"} < set(names_in("turnwise.rollout.loops"))
    module = builtin("turnwise.rollout.loops", "single_turn", "agent loop")
    assert module.__name__ == "turnwise.rollout.loops.single_turn"
    with pytest.raises(PluginError, match="unknown agent loop 'single_trun': did you mean 'single_turn'.*file.py:name"):
        builtin("turnwise.rollout.loops", "single_trun", "agent loop")
    with pytest.raises(PluginError, match="unknown tool 'tool'"):
        builtin("turnwise.rollout.tools", "tool", "tool", leave_out=("tool",))


def test_an_import_that_never_ends_is_said_and_ended(tmp_path, monkeypatch, capfd):
    (tmp_path / "endless.py").write_text("import time\ntry:\n    time.sleep(600)\nexcept Exception:\n    pass\n")
    monkeypatch.setattr("turnwise.system.plugins.SLOW_IMPORT", 0.05)
    monkeypatch.setattr("turnwise.system.plugins.LONGEST_IMPORT", 1.0)
    with pytest.raises(PluginError, match="it has not ended after 1 s"):
        load(f"{tmp_path}/endless.py:tool", "tool")
    assert "endless.py:tool': still importing after 0.05 s" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    (tmp_path / "quick.py").write_text("tool = 3\n")
    assert load(f"{tmp_path}/quick.py:tool", "tool") == 3
