"""Writes docs/layout.md: every file with the purpose its first line states. A test compares the page with the disk."""

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
SHOWN = (".py", ".md", ".yaml", ".jinja", ".js", ".css")
FOLDERS = {
    "turnwise": "the package",
    "turnwise/chat/templates": "Built-in chat templates",
    "turnwise/web/static": "The board's page: plain JavaScript modules, no build step",
    "turnwise/web/static/css": "How it looks",
    "turnwise/web/static/js": "What it does",
    "turnwise/web/static/js/pages": "One file per page",
    "turnwise/web/static/js/parts": "What pages are made of",
    "benchmarks": "Each prints a ratio against a named peer, measured in one run",
    "examples": "Tasks to copy from, and the Python examples of the docs",
    "examples/cluster": "A training on Kubernetes (KubeRay) and on Slurm",
    "docs": "What a newcomer reads after the README",
    "docs/decisions": "Choices that were not obvious: context, choice, price",
    "docs/results": "What recipes came to, with their curves and transcripts",
    "docs/results/tinylook": "The task tinylook: what can be had without a look, and what training came to",
}
HEAD = """# Layout

Every file says its purpose in its first line; this page collects them (`python docs/make_layout.py` writes it, a test
compares it with the disk). [CONTRIBUTING](../CONTRIBUTING.md) has the words, the layers and how to add things.

"""


def purpose(path: Path) -> str:
    """The first sentence of a file, without the marks of a comment."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        said = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
    elif path.suffix == ".jinja":
        said = re.split(r"\. ", text.split("-#}")[0].removeprefix("{#-"))[0]
    else:
        lines = [line for line in text.splitlines() if not line.startswith("# @package")]
        said = re.sub(r"^(#|//|/\*)\s*(\d{3} )?", "", lines[0] if lines else "").removesuffix("*/")
    return " ".join(said.split()).rstrip(".")


def folder_purpose(folder: str) -> str:
    """What a folder is for: its package's docstring, or else its entry in FOLDERS or the heading of its README."""
    place = ROOT / folder
    for name in ("__init__.py", "README.md"):
        if folder not in FOLDERS and (place / name).exists():
            return purpose(place / name)
    return FOLDERS[folder]


def tracked() -> list[str]:
    """Every file of ours that is on the disk and not ignored."""
    command = [
        "git",
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
        "turnwise",
        "benchmarks",
        "examples",
        "docs",
    ]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return sorted({p for p in listed if p.endswith(SHOWN) and not p.endswith("__init__.py") and (ROOT / p).exists()})


def lines_of(folder: str, files: list[str], depth: int) -> list[str]:
    """A folder's own line, its files, then its folders."""
    indent = "  " * depth
    lines = [f"{indent}{folder.rsplit('/', 1)[-1]}/  {folder_purpose(folder)}"]
    inside = [path for path in files if path.startswith(folder + "/")]
    here = [path for path in inside if "/" not in path[len(folder) + 1 :]]
    width = max((len(path) - len(folder) - 1 for path in here), default=0)
    lines += [f"{indent}  {path[len(folder) + 1 :]:{width}}  {purpose(ROOT / path)}" for path in here]
    for name in sorted({path[len(folder) + 1 :].split("/")[0] for path in set(inside) - set(here)}):
        lines += lines_of(f"{folder}/{name}", inside, depth + 1)
    return lines


def layout() -> str:
    """The whole page."""
    files = tracked()
    tree = [line for folder in ("turnwise", "benchmarks", "examples", "docs") for line in lines_of(folder, files, 0)]
    return HEAD + "```\n" + "\n".join(tree) + "\n```\n"


if __name__ == "__main__":
    page = ROOT / "docs" / "layout.md"
    page.write_text("# Layout\n", encoding="utf-8")  # so that the page lists itself
    page.write_text(layout(), encoding="utf-8")
