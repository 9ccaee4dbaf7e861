"""A run frozen into one HTML file: the board's page with the answers to all it will ask, for readers without a server.

The answers come from the functions that the server calls, under the addresses that the page would ask the server
(`url` in static/js/api.js). Of the trajectories only a few are taken along; a link to any other says so.
"""

import base64
import hashlib
import html
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from turnwise.errors import StorageError
from turnwise.ext.board import static_files
from turnwise.ext.board.columns import SPLITS
from turnwise.ext.board.conversation import conversation
from turnwise.ext.board.filters import BadFilter
from turnwise.ext.board.groups import group
from turnwise.ext.board.health import to_look_at
from turnwise.ext.board.images import image_bytes
from turnwise.ext.board.notable import FLIPPED_TO_RIGHT, FLIPPED_TO_WRONG, Place, finding_links, notable, passing
from turnwise.ext.board.presets import fields
from turnwise.ext.board.probes import is_probe, probe, with_counterparts
from turnwise.ext.board.reward_spread import spread
from turnwise.ext.board.runs import BoardRun, Runs
from turnwise.ext.board.sample_history import sample_history
from turnwise.ext.board.table import NotThere, listing, selection
from turnwise.ext.board.tokens import tokens
from turnwise.ext.board.tools import tools
from turnwise.storage.json_text import to_json
from turnwise.storage.run_dir import RunDir

MOST = 24
"""Trajectories taken along unless told otherwise."""
MOST_POSSIBLE = 1000
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
_POINTS = 600
_PAGE = 50
"""Rows that the list asks for at once (LIMIT in static/js/pages/trajectories.js)."""
_DIGITS = 7
"""Of the numbers of tokens and curves: as many as a 32-bit float has, more than a reader or a chart tells apart."""
_SHORT = 200
_IMAGE_KEYS = ("url", "source_url", "shown_url")

# `JSON.parse` and not an object literal, in which a model's key "__proto__" would be more than a key. An image that is
# shown in many places stands in the file once.
_START = """\
{
  const { answers, images, start } = JSON.parse(document.getElementById("frozen").textContent);
  const show = (node) => {
    for (const [key, one] of Object.entries(node)) {
      if (one !== null && typeof one === "object") show(one);
      else if (/^(source_|shown_)?url$/.test(key) && Object.hasOwn(images, one)) node[key] = images[one];
    }
  };
  const pictured = ([address]) => /\\/(trajectory|group|tokens)\\?/.test(address);
  for (const [, answer] of Object.entries(answers).filter(pictured)) show(answer);
  globalThis.FROZEN = answers;
  if (!location.hash) history.replaceState(null, "", start);
}
"""


@dataclass(frozen=True, slots=True)
class FrozenReport:
    """The file, how many trajectories are in it, and what could not be read: `FrozenReport(b"<!doc...", 24, ())`."""

    content: bytes
    trajectories: int
    left_out: tuple[str, ...]


def freeze(path: Path, *, most: int = MOST, filter: str = "") -> FrozenReport:
    """Everything about the run in `path`, with the trajectories that pass a filter, or else the most notable ones."""
    RunDir.open(path)
    runs = Runs([path])
    run = runs.open(runs.names()[0])
    run.check()
    run.series.refresh()
    run.table.refresh(None)
    state = run.health()
    wanted = passing(run.table, filter, most) if filter.strip() else notable(run.table, state["findings"], most)
    wanted = with_counterparts(run.dir, run.table, wanted)
    frozen = _Frozen(run)
    frozen.left_out += [f"{damaged['file']}: {damaged['reason']}" for damaged in run.table.damaged]
    frozen.add("/api/runs", {"runs": runs.summaries(time.time())})
    frozen.add_pages(state)
    places = [address for address in wanted if frozen.add_trajectory(*address)]
    frozen.add_lists(places, state["findings"])
    return FrozenReport(_page(run.name, frozen), len(places), tuple(frozen.left_out))


# --- what the page will ask -----------------------------------------------------------------------------------------


def address(path: str, **params: object) -> str:
    """What `url` of api.js makes of a path and parameters: sorted by name, empty ones left out."""
    pairs = sorted((name, str(value)) for name, value in params.items() if value is not None and value != "")
    query = "&".join(f"{_encoded(name)}={_encoded(value)}" for name, value in pairs)
    return f"{path}?{query}" if query else path


def _encoded(text: str) -> str:
    """As JavaScript's encodeURIComponent does."""
    return quote(text, safe="!~*'()")


class _Frozen:
    """The answers by address, and the images in them, each once."""

    def __init__(self, run: BoardRun) -> None:
        self._run = run
        self._base = f"/api/runs/{_encoded(run.name)}"
        self._pictures = f"/api/runs/{quote(run.name, safe='')}/image?"  # as pictures.py writes it
        self.answers: dict[str, Any] = {}
        self.images: dict[str, str] = {}
        self.left_out: list[str] = []
        self._known: dict[str, str | None] = {}

    def add(self, path: str, answer: Any, **params: object) -> None:
        self.answers[address(path, **params)] = answer

    def add_pages(self, state: dict[str, Any]) -> None:
        """Adds the answers of every page but those of trajectories."""
        run, base = self._run, self._base
        text, values = run.config()
        series = {name: run.series.thinned(name, _POINTS) for name in run.series.names()}
        self.add(base, run.details(time.time()))
        self.add(f"{base}/config", {"text": text, "values": values})
        self.add("/api/diff", {"keys": []}, runs=run.name)
        self.add(f"{base}/series", _shortened({"series": series}), names="*")
        self.add(f"{base}/spread", _shortened(spread(run.table)))
        self.add(f"{base}/tools", tools(run.table))
        self.add(f"{base}/health", state)
        self.add(f"{base}/watch", to_look_at(state))
        self.add(f"{base}/fields", fields())
        if is_probe(run.dir):
            self.add(f"{base}/probe", probe(run.dir, run.table))

    def add_trajectory(self, shard: str, row: int) -> bool:
        """One trajectory, its tokens and its group; False for one that cannot be read, which is then told."""
        run, base = self._run, self._base
        try:
            answer = conversation(run.dir, run.table, shard, row, name=run.name)
            counted = self._with_images(tokens(run.dir, run.table, shard, row, name=run.name))
            sample = answer["entry"]["sample_id"]
            together = address(f"{base}/group", shard=shard, sample=sample)
            if together not in self.answers:
                self.answers[together] = self._with_images(group(run.dir, run.table, shard, sample, name=run.name))
        except (StorageError, NotThere) as error:
            self.left_out.append(f"{shard}, row {row}: {error}")
            return False
        self.add(f"{base}/trajectory", self._with_images(answer), shard=shard, row=row)
        self.add(f"{base}/tokens", _shortened(counted), shard=shard, row=row)
        self.add(f"{base}/sample", sample_history(run.table, sample), sample=sample)
        return True

    def add_lists(self, places: Sequence[Place], findings: Sequence[dict[str, Any]]) -> None:
        """The list of what is in the report, whole and as the other pages' links cut it; links between them."""
        for shard, row in places:
            rows = sorted(other for where, other in places if where == shard)
            answer = self.answers[address(f"{self._base}/trajectory", shard=shard, row=row)]
            before, after = (
                [sibling for sibling in rows if sibling < row],
                [sibling for sibling in rows if sibling > row],
            )
            answer["neighbours"] = {"previous": before[-1] if before else None, "next": after[0] if after else None}
            answer["siblings"] = [sibling for sibling in answer["siblings"] if sibling in rows]
        tools = self.answers[f"{self._base}/tools"]
        links = {("", split): None for split in ("all", *SPLITS)}
        links |= dict.fromkeys(finding_links(findings))
        links |= dict.fromkeys(tool_links(tools))
        for filter, split in links:
            self._add_list(places, filter, split)

    def _add_list(self, places: Sequence[Place], filter: str, split: str) -> None:
        table = self._run.table
        snapshot = table.snapshot
        try:
            mask = selection(snapshot, split=split, filter=filter)
        except BadFilter:  # the name of a data source too long for a filter: the board refuses that link too
            return
        passing = [
            address for address in places if mask[int(snapshot.starts[snapshot.places[address[0]]]) + address[1]]
        ]
        rows = [table.entry(*address) for address in passing]
        rows.sort(key=lambda row: (-row["step"], row["shard"], row["row"]))
        total = listing(table, split=split, limit=0)["total"]
        query = {"split": split, "filter": filter, "sort": "step", "order": "desc", "limit": _PAGE}
        for offset in range(0, max(len(rows), 1), _PAGE):
            answer = {"total": total, "matched": len(rows), "offset": offset, "rows": rows[offset : offset + _PAGE]}
            answer |= {"error": None, "pending": 0, "damaged": table.damaged, "left_out": table.left_out}
            self.add(f"{self._base}/trajectories", answer, **query, offset=offset)

    def _with_images(self, value: Any) -> Any:
        """The answer with every image by a short name under which `images` holds it as a data: URL."""
        if isinstance(value, list):
            return [self._with_images(entry) for entry in value]
        if not isinstance(value, dict):
            return value
        return {
            key: self._image(entry) if key in _IMAGE_KEYS and isinstance(entry, str) else self._with_images(entry)
            for key, entry in value.items()
        }

    def _image(self, url: str) -> str | None:
        """A name that nobody else gives (a model writes keys `url` too); what is no image of ours stays as it is."""
        inline = url.startswith("data:image/") and len(url) > _SHORT
        if not inline and not url.startswith(self._pictures):
            return url
        if url not in self._known:
            content = url if inline else self._read_image(url)
            self._known[url] = None
            if content is not None:
                name = f"image:{hashlib.sha256(content.encode()).hexdigest()[:32]}"
                self.images[name] = content
                self._known[url] = name
        return self._known[url]

    def _read_image(self, url: str) -> str | None:
        """A kept image; None for one that is gone, which the page shows by its source."""
        name = parse_qs(urlsplit(url).query).get("name", [""])[0]
        try:
            content, kind = image_bytes(self._run.dir, name)
        except NotThere as error:
            self.left_out.append(f"{name}: {error}")
            return None
        return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def tool_links(page: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(filter, split) of the links that the page of tools makes of its answer."""
    for source in page["funnel"]["sources"]:
        yield f"data_source == {quoted(source)} and failure == null", page["funnel"]["split"]
    yield FLIPPED_TO_RIGHT, "eval"
    yield FLIPPED_TO_WRONG, "eval"
    for failure in page["failures"]:
        if failure["filter"]:
            yield failure["filter"], "all"


def quoted(text: str) -> str:
    """A text for a filter expression, as `quoted` of parts/filter_text.js writes it."""
    letters = json.dumps(text, ensure_ascii=False)
    return "".join(
        letter
        if letter.isprintable()
        else f"\\u{ord(letter):04x}"
        if letter < "\U00010000"
        else f"\\U{ord(letter):08x}"
        for letter in letters
    )


def _shortened(value: Any) -> Any:
    """Numbers with as many digits as they have meaning, which halves the file."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _shortened(entry) for key, entry in value.items()}
    return [_shortened(entry) for entry in value] if isinstance(value, list | tuple) else value


# --- the file -------------------------------------------------------------------------------------------------------


def _page(name: str, frozen: _Frozen) -> bytes:
    """index.html with all it names put inside. A piece of it that is not found is a bug here."""
    text = static_files.static_file("index.html").content.decode("utf-8")
    content = {"answers": frozen.answers, "images": frozen.images, "start": f"#/run/{_encoded(name)}/curves"}
    data = f'<script type="application/json" id="frozen">{safe_json(content)}</script>\n<script>{_START}</script>'
    plotly = _in_script(static_files.plotly(zipped=False).content.decode("utf-8"))
    imports = {f"board/{path}": _data_url(body) for path, body in _modules()}
    import_map = f'<script type="importmap">{safe_json({"imports": imports})}</script>'
    policy = f'<meta http-equiv="Content-Security-Policy" content="{html.escape(POLICY)}">'
    for pattern, new in (
        (r'<meta charset="utf-8">', f'<meta charset="utf-8">\n{policy}'),
        (r"<title>[^<]*</title>", f"<title>{html.escape(name)} · Turnwise report</title>"),
        (r'<script type="importmap">.*?</script>', import_map),
        (r'<script src="/plotly\.js"[^>]*></script>', f"<script>{plotly}</script>\n{data}"),
        (
            r'<script type="module" src="/static/js/main\.js"></script>',
            '<script type="module">import "board/main.js";</script>',
        ),
    ):
        text = _replaced(text, pattern, new)
    text = re.sub(r'<link rel="stylesheet" href="/static/(css/[\w-]+\.css)">', _style, text)
    return text.encode("utf-8")


def _replaced(text: str, pattern: str, new: str) -> str:
    changed, count = re.subn(pattern, lambda _: new, text, count=1, flags=re.DOTALL)
    if not count:
        raise RuntimeError(f"index.html has no {pattern}")
    return changed


def _style(match: re.Match[str]) -> str:
    body = static_files.static_file(match[1]).content.decode("utf-8")
    return f"<style>{body.replace('</', '<' + chr(92) + '/')}</style>"


def _modules() -> Iterator[tuple[str, bytes]]:
    folder = static_files.STATIC / "js"
    for path in sorted(folder.rglob("*.js")):
        yield path.relative_to(folder).as_posix(), path.read_bytes()


def _data_url(body: bytes) -> str:
    return f"data:text/javascript;charset=utf-8;base64,{base64.b64encode(body).decode()}"


def _in_script(code: str) -> str:
    """Code that cannot end its script element: both only ever stand in strings and patterns."""
    return re.sub("</(?=script)", r"<\\/", code, flags=re.IGNORECASE).replace("<!--", r"<\!--")


def safe_json(value: Any) -> str:
    """JSON that may stand in a script element: without `<`, so that nothing a model wrote ends it, and without nan."""
    return to_json(value).decode().replace("<", "\\u003c")
