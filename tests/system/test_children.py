"""Children end with their parent, however that ends; how they ended is told in words; the clocked ones are replaced."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from turnwise.system import children
from turnwise.system.children import ClockedProcess, ClockedProcesses, NoAnswer

CHILDREN = {
    "the kernel ends it": "children.end_with_parent()",
    "a thread ends it": "children.when_parent_ends(lambda: os._exit(1))",
    "it hangs with the lock held": "children.end_with_parent(); say(); re.match('(a+)+$', 'a' * 64 + 'b')",
    "it ignores what it can": """
children.end_with_parent()
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
""",
}
CHILD = """
import os, re, signal, subprocess, sys, time
from turnwise.system import children
def say():
    os.rename(sys.argv[1] + ".part", sys.argv[1])
with open(sys.argv[1] + ".part", "w") as file:
    file.write(str(os.getpid()))
{body}
say()
time.sleep(600)
"""
PARENT = """
import os, sys, time
from turnwise.system import children
process = children.start(sys.argv[1:])
if {forks} and not os.fork():
    time.sleep(5)  # with a copy of the lifeline's other end
    os._exit(0)
time.sleep(600)
"""


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition, seconds=30.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def child_of_a_killed_parent(tmp_path, command, number, forks=False):
    """The number of the child, which has told it in the file `pid`, after its parent got this signal."""
    pid = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-c", PARENT.format(forks=forks), *command])
    try:
        wait_for(pid.exists)
        child = int(pid.read_text())
        assert is_there(child)
    finally:
        parent.send_signal(number)
        assert parent.wait() == -number
    return child


@pytest.mark.parametrize("body", CHILDREN.values(), ids=CHILDREN)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_child_of_a_killed_parent_is_gone(tmp_path, body, number):
    command = [sys.executable, "-c", CHILD.format(body=body), str(tmp_path / "pid")]
    child = child_of_a_killed_parent(tmp_path, command, number)
    wait_for(lambda: not is_there(child))


def test_a_guarded_command_is_gone_with_the_parent_of_its_guard(tmp_path):
    """Though it knows nothing of us."""
    code = "import os, sys, time; open(sys.argv[1] + 'x', 'w').write(str(os.getpid())); "
    code += "os.rename(sys.argv[1] + 'x', sys.argv[1]); time.sleep(600)"
    command = [sys.executable, "-I", children.__file__, sys.executable, "-c", code, str(tmp_path / "pid")]
    child = child_of_a_killed_parent(tmp_path, command, signal.SIGKILL)
    wait_for(lambda: not is_there(child))


def test_a_fork_of_the_parent_that_holds_the_lifeline_keeps_no_child_alive(tmp_path):
    code = CHILD.format(body=CHILDREN["a thread ends it"])
    command = [sys.executable, "-c", code, str(tmp_path / "pid")]
    child = child_of_a_killed_parent(tmp_path, command, signal.SIGKILL, forks=True)
    wait_for(lambda: not is_there(child), 4.0)


def test_a_child_whose_lifeline_was_cut_before_it_looked_ends_all_the_same():
    code = "import time; time.sleep(0.3); from turnwise.system import children; children.end_with_parent(); print('on')"
    process = children.start([sys.executable, "-c", code], stdout=subprocess.PIPE)
    children.cut(process)
    assert process.stdout is not None and process.stdout.read() == b""
    assert process.wait() == -signal.SIGKILL


def test_what_runs_in_the_child_finds_an_empty_standard_input():
    code = "import sys; from turnwise.system import children; children.end_with_parent(); print(sys.stdin.read())"
    process = children.start([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.read() == b"\n"
    assert children.end(process, 30.0) == 0


def test_one_that_does_not_end_kindly_is_killed_with_what_it_started():
    code = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    process = children.start([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    other = int(process.stdout.readline())
    assert children.end(process, 0.1) == -signal.SIGKILL == children.end(process)
    wait_for(lambda: not is_there(other))


def test_how_it_ended_is_told_in_words():
    words = {3: "exit status 3", -9: "SIGKILL", -200: "signal 200", None: "it does not answer"}
    assert {status: children.exit_words(status) for status in words} == words


SCRIPT = """
    import json, os, signal, sys
    for line in sys.stdin:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, question["seconds"])
        exec(question.get("code", ""))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps({"pid": os.getpid(), "text": question.get("text")}), flush=True)
    """


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def test_a_question_that_takes_for_ever_ends_and_the_next_is_answered(script):
    process = ClockedProcess(script, 100)
    with pytest.raises(NoAnswer, match="SIGPROF") as caught:
        process.ask({"code": "while True: pass"}, 0.1)
    assert caught.value.too_much
    assert process.ask({"text": "ä" * 1_000_000}, 5.0)["text"] == "ä" * 1_000_000
    with pytest.raises(NoAnswer, match="ended twice, at last with SIGKILL") as caught:
        process.ask({"code": "os.kill(os.getpid(), 9)"}, 5.0)
    assert not caught.value.too_much
    process.close()


def test_one_that_dies_once_is_asked_again_and_one_that_was_asked_often_is_replaced(script, tmp_path):
    process = ClockedProcess(script, 2)
    once = f"if not os.path.exists({str(tmp_path / 'x')!r}): open({str(tmp_path / 'x')!r}, 'w'); os._exit(1)"
    pids = [process.ask({"code": code}, 5.0)["pid"] for code in (once, "", "")]
    assert pids[0] == pids[1] != pids[2]
    process.close()
    assert not any(map(is_there, pids))


def test_processes_are_lent_and_a_fork_starts_its_own(script):
    processes = ClockedProcesses(script, 2, 100)
    futures = [processes.submit(processes.ask, {"code": "import time; time.sleep(0.2)"}, 5.0) for _ in range(4)]
    pids = {future.result()["pid"] for future in futures}
    assert len(pids) == 2
    reader, writer = os.pipe()
    fork = os.fork()
    if not fork:
        os.write(writer, str(processes.ask({}, 5.0)["pid"]).encode())
        processes.close()
        os._exit(0)
    assert os.waitpid(fork, 0)[1] == 0
    assert int(os.read(reader, 100)) not in pids and processes.ask({}, 5.0)["pid"] in pids
    os.close(reader)
    os.close(writer)
    processes.close()
    assert not any(map(is_there, pids))
