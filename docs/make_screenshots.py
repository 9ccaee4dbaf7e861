"""Makes docs/images/board-*.png, pages of the board over real runs in chromium: `make_screenshots.py RUN...`."""

import argparse
import contextlib
import io
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

LARGEST = 200_000
COLOURS = 256
SIZE = {"width": 1280, "height": 800}
TALL = {"width": 1280, "height": 1120}
NARROW = {"width": 390, "height": 780}
ARGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
        "--disable-sync", "--no-first-run"]  # fmt: skip
SERVE = (
    "import sys; from pathlib import Path; from turnwise.ext.board.serve import serve; "
    "serve([Path(p) for p in sys.argv[1:]], '127.0.0.1', 0, None, ready=lambda url: print(url, flush=True))"
)

# All files were read and every chart in view is there; one without values stays empty.
DRAWN = """() => !document.querySelector(".run-line [role=status]") &&
  [...document.querySelectorAll(".panel:not(.panel-empty) .plot")]
  .filter((plot) => plot.getBoundingClientRect().top < innerHeight)
  .every((plot) => plot.querySelector(".main-svg"))"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="runs to show; the pages are of the first")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        sys.stderr.write("chromium is not here\n")
        return 1
    with board(args.runs) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGS)
        for name, path, theme, size in shots(browser, address, args.runs[0].resolve().name):
            page = opened(browser, address, path, theme, size)
            keep(page, name, args.out)
            page.context.close()
        browser.close()
    return 0


@contextlib.contextmanager
def board(runs: list[Path]) -> Iterator[str]:
    """The address of a board over these runs."""
    process = subprocess.Popen([sys.executable, "-c", SERVE, *map(str, runs)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip().rstrip("/")
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()


def shots(browser: Browser, address: str, run: str) -> list[tuple[str, str, str, dict[str, int]]]:
    """(name, page, theme, size) of every picture; a right answer after several calls is the example, where others of
    its group were wrong."""
    page = browser.new_page()
    page.goto(address)

    def ask(path: str) -> Any:
        return page.evaluate("async (path) => (await fetch(path)).json()", path)

    rows = ask(
        f"/api/runs/{run}/trajectories?split=train&sort=calls&order=desc&limit=1&filter=right%20and%20advantage%20%3E%200"
    )["rows"]
    row = rows[0] if rows else ask(f"/api/runs/{run}/trajectories?split=all&limit=1")["rows"][0]
    held_out = (ask(f"/api/runs/{run}/trajectories?split=eval&limit=1")["rows"] or [row])[0]  # of every evaluation
    runs = ask("/api/runs")["runs"]
    about = next(one for one in runs if one["name"] == run)
    probe = next((one["name"] for one in runs if one["command"] == "probe"), None)
    asked = f"/api/runs/{probe}/trajectories?split=eval&sort=calls&order=desc&limit=1"
    looked = ask(asked)["rows"][0] if probe else None
    page.close()
    place = f"shard={row['shard']}&row={row['row']}"
    base = f"#/run/{run}"
    pages = {
        "runs": "#/",
        "curves": f"{base}/curves",
        "tools": f"{base}/tools",
        "trajectories": f"{base}/trajectories",
        "group": f"{base}/group?shard={row['shard']}&sample={row['sample_id']}",
        "sample": f"{base}/sample?sample={held_out['sample_id']}",
        "conversation": f"{base}/trajectory?{place}",
        "tokens": f"{base}/trajectory?{place}&view=tokens&colour=logprob",
        "health": f"{base}/health",
    }
    if evaluation := next((one["name"] for one in runs if one["command"] == "eval"), None):
        pages["results"] = f"#/run/{evaluation}/curves"
    seeds = [one["name"] for one in runs if one["command"] == "train" and one["task"] == about["task"]]
    if len(seeds) > 2:
        pages["compare"] = f"#/compare?runs={','.join(seeds)}"
    if looked:
        pages["probe"] = f"#/run/{probe}/curves"
    made = [(name, path, "light", SIZE) for name, path in pages.items()]
    if looked:
        beside = f"#/run/{probe}/beside?shard={looked['shard']}&row={looked['row']}&probe=noise&targets=1"
        made.append(("beside", beside, "light", TALL))
    made += [(f"{name}-dark", pages[name], "dark", SIZE) for name in ("curves", "conversation")]
    return [*made, ("conversation-narrow", pages["conversation"], "light", NARROW)]


def opened(browser: Browser, address: str, path: str, theme: str, size: dict[str, int]) -> Page:
    """The page once it has drawn itself."""
    context = browser.new_context(viewport=size, color_scheme=theme, reduced_motion="reduce")  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(f"{address}/{path}")
    page.wait_for_selector("main:not([aria-busy]) h1", state="attached")
    page.wait_for_function(DRAWN)
    if "view=tokens" in path:
        page.wait_for_selector(".written .token, .empty")
        if page.locator(".written .token").count() > 3:  # a run of an endpoint has no tokens
            page.locator(".written .token").nth(3).hover()
    if "/sample?" in path:
        page.wait_for_selector("section [role=status]:text-matches('played|no other')")
    page.wait_for_load_state("load")
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return page


def keep(page: Page, name: str, folder: Path) -> None:
    """A PNG with few colours: a page of text needs no more."""
    shown = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    path = folder / f"board-{name}.png"
    shown.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    size = path.stat().st_size
    sys.stdout.write(f"{path}: {size / 1000:.0f} kB\n")
    if size > LARGEST:
        raise SystemExit(f"{path} has {size} bytes, more than {LARGEST}")


if __name__ == "__main__":
    sys.exit(main())
