"""What a reader of transcripts sees first: the prompt folded, colours with their keys, a call that could not be read."""

try:
    from playwright.sync_api import expect
except ModuleNotFoundError:  # the browser fixture then skips or fails
    expect = None

HOSTILE_ROW = "#/run/live/trajectory?shard=trajectories/step_000012&row=16"
TURN = """async (said) => {
  const { turnCard } = await import("board/parts/turns.js");
  const asked = { id: "a", name: "", arguments: {}, problem: "the call is not valid JSON" };
  const reply = { role: "tool", text: said, images: [] };
  const call = { ...asked, status: "malformed", seconds: 0, reply, images: [] };
  const message = { role: "assistant", text: "<call>{broken</call>", answer: "", tool_calls: [asked], images: [] };
  const card = turnCard({ index: 0, message, calls: [call], replies: [], completion_tokens: 3 }, { longest: 1 });
  return [card.textContent.split("not valid JSON").length - 1, card.querySelector(".as-written").open, card.textContent];
}"""


def test_a_call_that_could_not_be_read_shows_its_text_and_its_problem_once(open_page):
    page = open_page("#/run/live/health")
    times, shown, text = page.evaluate(TURN, "Error: the call is not valid JSON")
    assert times == 1 and shown and "{broken" in text and "no arguments" not in text
    assert page.evaluate(TURN, "It failed.")[0] == 1, "a reply that does not say it leaves that to the call"


def test_a_long_prompt_of_tokens_is_folded_until_it_is_opened_and_stays_so(open_page):
    page = open_page(f"{HOSTILE_ROW}&view=tokens&colour=entropy")
    prompt = page.locator(".prompt-fold")
    expect(page.get_by_role("button", name="4 entropy")).to_have_attribute("aria-pressed", "true")
    expect(page.locator(".block.written").first).to_be_visible()
    expect(prompt.locator(".token").first).to_be_hidden()
    page.locator(".written .token").first.click()
    page.keyboard.press("ArrowLeft")  # into the prompt, which opens for it
    expect(prompt.locator(".token:focus")).to_be_visible()
    page.reload()
    expect(prompt.locator(".token").first).to_be_hidden()
    prompt.locator("summary").click()
    page.reload()
    expect(prompt.locator(".token").first).to_be_visible()
    page.keyboard.press("1")
    expect(page.get_by_role("button", name="1 origin")).to_have_attribute("aria-pressed", "true")
