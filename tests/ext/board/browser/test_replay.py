"""An episode played again from the page of a board that may."""

import subprocess
import sys

import pytest

try:
    from playwright.sync_api import expect
except ModuleNotFoundError:  # the browser fixture then skips or fails
    expect = None


@pytest.fixture(scope="module")
def replaying_board(tmp_path_factory):
    """The address of a board that may replay, over one evaluation of the bundled model."""
    runs = tmp_path_factory.mktemp("replayed")
    arguments = ["eval", "eval.samples=1", "engine.threads=1", "run=first", f"runs_dir={runs}", "--no-transcript"]
    turnwise = [
        sys.executable,
        "-m",
        "turnwise.commands.cli",
    ]  # while the browser runs, no event loop can begin in this process
    subprocess.run([*turnwise, *arguments], check=True, capture_output=True)
    board = [*turnwise, "board", str(runs), "--port", "0", "--replay"]
    with subprocess.Popen(board, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().split()[-1].rstrip("/")
        finally:
            process.terminate()


@pytest.mark.long  # test_replays.py plays through the same routes
def test_a_reply_is_edited_on_the_page_and_the_episode_goes_on_from_there(browser, replaying_board, watch):
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    context.set_default_timeout(120_000)
    page = context.new_page()
    watch.listen(page)
    page.goto(f"{replaying_board}/#/run/first/trajectory?shard=eval/step_000000&row=0")
    page.get_by_label("From where").select_option(label="turn 0: result of calculate")
    words = page.get_by_label("What is said there instead")
    expect(words).not_to_be_empty()
    words.fill("987654")
    page.get_by_role("button", name="Play it again").click()
    page.get_by_role("link", name="Open the replay").click(timeout=120_000)
    expect(page.locator(".replay-parted")).to_contain_text("in turn 0")
    expect(page.locator(".replay-after").first).to_contain_text("987654")
    expect(page.locator(".timeline")).to_contain_text("987654")
    context.close()
    watch.check((f"{replaying_board}/", "data:", "blob:"))
