"""What the pages name is there: links and their anchors, files, config keys, commands, attributes of classes."""

import ast
import re
from pathlib import Path

from turnwise.commands.cli import VERBS
from turnwise.config.knobs import knobs_of
from turnwise.config.sections import full_config
from turnwise.extensions import extensions
from turnwise.rollout.conversation import Conversation

ROOT = Path(__file__).parent.parent
FILES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
PAGES = {str(path.relative_to(ROOT)): path for path in sorted(FILES)}
PAGES_ON_VERL = {"docs/ext/verl.md", "docs/ext/mcp.md", "examples/inside_verl/README.md"}
"""They name keys, modules and files of verl."""
FORMER_KEYS = {("docs/decisions/020-core-and-extensions.md", "engine.servers")}
ENDINGS = (
    "py",
    "md",
    "yaml",
    "toml",
    "json",
    "jsonl",
    "js",
    "jinja",
    "sh",
    "sbatch",
    "css",
    "safetensors",
    "pt",
    "log",
)


def without_blocks(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


TEXTS = {name: path.read_text() for name, path in PAGES.items()}
CODE = {
    name: [*re.findall(r"`([^`\n]+)`", without_blocks(text)), *re.findall(r"(?m)^    +(\S.*)$", text)]
    for name, text in TEXTS.items()
}
"""By page: what stands in backticks, and indented lines."""


def named(pattern: str) -> set[tuple[str, str]]:
    """(page, name) for every match in the code of the pages."""
    return {(page, word) for page, spans in CODE.items() for span in spans for word in re.findall(pattern, span)}


def anchors(text: str) -> set[str]:
    headings = re.findall(r"(?m)^#+ (.*)$", without_blocks(text))
    words = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", line).replace(" ", "-") for line in words}


def test_links_lead_to_files_and_headings() -> None:
    links = [
        (page, target)
        for page, text in TEXTS.items()
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", without_blocks(text)))
        if not target.startswith("http")
    ]
    assert len(links) > 100
    dead = []
    for page, target in links:
        file, _, anchor = target.partition("#")
        path = PAGES[page].parent / file if file else PAGES[page]
        if not path.exists() or (anchor and anchor not in anchors(path.read_text())):
            dead.append((page, target))
    assert dead == []


def test_files_that_pages_name_exist() -> None:
    """Files of the repository: those whose first folder is one at the root or of the package."""
    roots = (ROOT, ROOT / "turnwise")
    files = {
        (page, word)
        for page, word in named(rf"(?<![\w./-])\w[\w.-]*(?:/[\w.-]+)+\.(?:{'|'.join(ENDINGS)})(?![\w/])")
        if any((root / word.split("/")[0]).is_dir() for root in roots) and "NAME" not in word
    }
    assert len(files) > 100
    bases = {page: (*roots, path.parent) for page, path in PAGES.items()}
    assert sorted((page, word) for page, word in files if not any((base / word).exists() for base in bases[page])) == []


def test_config_keys_that_pages_name_exist() -> None:
    knobs = knobs_of(full_config())
    sections = {key.split(".")[0] for key in knobs if "." in key}
    loops = {f"chat.{name}" for name in (*dir(Conversation), "artifacts", "sample")}
    keys = {
        (page, word)
        for page, word in named(r"(?<![\w./:*-])([a-z_]+\.[a-z_]\w*(?:\.\w+)*)")
        if word.split(".")[0] in sections and word.rsplit(".")[-1] not in ENDINGS and page not in PAGES_ON_VERL
    }
    assert len(keys) > 300
    unknown = {(page, word) for page, word in keys if ".".join(word.split(".")[:2]) not in knobs.keys() | loops}
    assert unknown == FORMER_KEYS


def test_commands_that_pages_show_exist() -> None:
    verbs = {verb for group in VERBS.values() for verb in group}
    verbs |= {verb for extension in extensions().values() for verb in extension.verbs}
    verbs |= {"hilo"}  # of examples/extension
    assert (
        sorted((page, verb) for page, verb in named(r"(?:^|(?<!import)\s)turnwise ([a-z][\w-]*)") if verb not in verbs)
        == []
    )


def test_attributes_of_classes_that_pages_name_exist() -> None:
    classes: dict[str, set[str]] = {}
    for path in (ROOT / "turnwise").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                inside = list(ast.walk(node))
                words = {part.id for part in inside if isinstance(part, ast.Name)}
                words |= {part.attr for part in inside if isinstance(part, ast.Attribute)}
                words |= {part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}
                classes.setdefault(node.name, set()).update(words)
    places = {(page, word) for page, word in named(r"\b([A-Z]\w*[a-z]\w*\.[a-z]\w*)") if word.split(".")[0] in classes}
    places -= {(page, "Image.open") for page in PAGES}  # Pillow's
    assert len(places) > 10
    assert sorted((page, word) for page, word in places if word.split(".")[1] not in classes[word.split(".")[0]]) == []
