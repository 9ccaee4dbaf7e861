"""The README's tree is compared with the disk."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent


def tree_in_readme() -> dict[str, str]:
    """Path -> purpose, from the indented tree between the markers."""
    block = re.search(r"<!-- tree -->\n```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block, "README.md has no tree"
    found: dict[str, str] = {}
    stack: list[str] = []
    for line in block.group(1).splitlines():
        name, _, purpose = line.strip().partition("  ")
        depth = (len(line) - len(line.lstrip())) // 2
        stack = [*stack[:depth], name.rstrip("/")]
        found["/".join(stack)] = purpose.strip()
    return found


def test_every_source_file_is_in_the_tree_with_a_purpose_and_the_other_way_round():
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "turnwise", "benchmarks", "examples", "docs"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    on_disk = {p for p in listed if p.endswith((".py", ".md", ".yaml", ".jinja")) and not p.endswith("__init__.py")}
    on_disk = {p for p in on_disk if (ROOT / p).exists()}
    tree = tree_in_readme()
    files = {path for path in tree if "." in path.rsplit("/", 1)[-1]}
    assert on_disk - files == set(), "files without a line in the README's tree"
    assert files - on_disk - {p for p in files if (ROOT / p).exists()} == set(), "lines without a file"
    assert [path for path in files if len(tree[path]) < 10] == [], "a purpose is missing"
