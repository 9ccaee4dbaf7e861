"""The Python API in a real Jupyter kernel, whose cells run inside an event loop."""

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupyter_client
import nbformat
import pytest
from nbclient import NotebookClient

PACKAGE = Path(__file__).parent.parent
MANY_SECONDS = 300


class Notebook:
    """Runs cells one after another and gives what each of them printed."""

    def __init__(self, folder: Path) -> None:
        self._kernel = jupyter_client.KernelManager(kernel_name="python3")  # ipykernel's own: this interpreter
        self._kernel.start_kernel(cwd=str(folder))
        self._client = self._kernel.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=MANY_SECONDS)
        self.html = ""
        """What was displayed so far."""

    def start(self, cell: str) -> str:
        return str(self._client.execute(cell))

    def until(self, request: str, words: str = "") -> str:
        """What the cell of this request printed until it ended, or until it printed `words`."""
        printed = ""
        while True:
            try:
                message = self._client.get_iopub_msg(timeout=MANY_SECONDS)
            except queue.Empty:
                raise AssertionError(f"the cell printed {printed!r} and no more") from None
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                printed += content["text"]
            elif message["msg_type"] in ("display_data", "update_display_data"):  # what is printed, and pictures
                printed += content["data"].get("text/plain", "")
                self.html += content["data"].get("text/html", "")
            elif message["msg_type"] == "error":
                printed += f"{content['ename']}: {content['evalue']}"
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return printed
            if words and words in printed:
                return printed

    def run(self, cell: str) -> str:
        return self.until(self.start(cell))

    def interrupt(self) -> None:
        self._kernel.interrupt_kernel()

    def close(self) -> None:
        self._client.stop_channels()
        self._kernel.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    notebook = Notebook(tmp_path_factory.mktemp("notebook"))
    try:
        assert notebook.run(f"import sys; sys.path.insert(0, {str(PACKAGE)!r}); import turnwise as tw") == ""
        yield notebook
    finally:
        notebook.close()


def test_the_notebook_of_the_examples_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It evaluates, trains, shows its progress and its curve, and reads the run back."""
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE))
    notebook = nbformat.read(PACKAGE / "examples" / "first_run.ipynb", as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in cells), "it is kept without outputs"
    NotebookClient(notebook, timeout=MANY_SECONDS, resources={"metadata": {"path": str(tmp_path)}}).execute()
    _, evaluated, trained, read, episode = ("".join(map(shown, cell.outputs)) for cell in cells)
    assert "evaluating" in evaluated and "8/8" in evaluated and "<pre" in evaluated
    assert "ipywidgets" not in evaluated
    assert evaluated.count("stop reasons") == 2, "the table once, as text and as HTML"
    assert trained.count("train longer") == 2
    assert "<svg" in trained and "reward" in trained and "2/2" in trained
    assert " episodes in " in read and " eval/step_000002 " in read and episode[:1].isdigit()


def shown(output: Any) -> str:
    """What one output of a cell says, as text and as HTML."""
    data = output.get("data", {})
    return f"{output.get('text', '')}{data.get('text/plain', '')}{data.get('text/html', '')}"


@pytest.mark.long  # evaluating and training in a kernel are tried here, and fine-tuning in tests/test_sft.py
def test_sft_runs(notebook: Notebook):
    cell = "import pathlib; report = tw.sft(tw.configure('sft.traces=4', 'sft.steps=1', 'run=taught')); print(pathlib.Path('runs/taught/policy').is_dir())"
    assert notebook.run(cell).splitlines()[-1] == "True"
    assert "fine-tuning, 1 steps" in notebook.run("print(report)")


def test_an_interrupt_ends_the_step_and_the_run_can_be_resumed(notebook: Notebook):
    settings = "'run=second', 'training.groups=2', 'training.group_size=2', 'eval.samples=2', 'training.max_lag=0'"
    request = notebook.start(f"tw.train(tw.configure('training.steps=1000', {settings}))")
    notebook.until(request, "3/1000")
    assert "<svg" in notebook.html and "reward" in notebook.html
    notebook.interrupt()
    assert "stopping after the current step" in notebook.until(request)
    steps = notebook.run(
        "import pathlib; print(max(int(name.name[5:]) for name in pathlib.Path('runs/second/checkpoints').glob('step_*')))"
    )
    again = notebook.run(f"tw.train(tw.configure('training.steps={int(steps) + 1}', 'resume=auto', {settings}))")
    assert f"{int(steps) + 1}/{int(steps) + 1}" in again
