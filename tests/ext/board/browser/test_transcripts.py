"""What a reader of transcripts sees first: the prompt folded, colours with their keys, a call that could not be read."""

try:
    from playwright.sync_api import expect
except ModuleNotFoundError:  # the browser fixture then skips or fails
    expect = None

HOSTILE_ROW = "#/run/live/trajectory?shard=trajectories/step_000012&row=16"
TURN = """async (said) => {
  const { turnCard } = await import("board/parts/turns.js");
  const { messageCard } = await import("board/parts/messages.js");
  const asked = { id: "a", name: "", arguments: {}, problem: "the call is not valid JSON" };
  const reply = { role: "tool", text: said, images: [] };
  const call = { ...asked, status: "malformed", seconds: 0, reply, images: [] };
  const message = { role: "assistant", text: "<call>{broken</call>", answer: "", tool_calls: [asked], images: [] };
  const card = turnCard({ index: 0, message, calls: [call], replies: [], completion_tokens: 3 }, { longest: 1 });
  const cards = [card, messageCard(message)]; // of a conversation, and of a group
  const shown = cards.every((one) => one.querySelector(".as-written").open);
  return [card.textContent.split("not valid JSON").length - 1, shown, cards.map((one) => one.textContent)];
}"""


def test_a_call_that_could_not_be_read_shows_its_text_and_its_problem_once(open_page):
    page = open_page("#/run/live/health")
    times, shown, texts = page.evaluate(TURN, "Error: the call is not valid JSON")
    assert times == 1 and shown
    assert all("{broken" in text and "no arguments" not in text for text in texts)
    assert page.evaluate(TURN, "It failed.")[0] == 1, "a reply that does not say it leaves that to the call"


def test_a_long_system_prompt_is_folded_and_a_short_one_is_not(open_page):
    page = open_page("#/run/live/health")
    fold = """async (text) => (await import("board/parts/messages.js")).messageCard({ role: "system", text, images: [] }).open"""
    assert [page.evaluate(fold, "word " * words) for words in (20, 200)] == [True, False]


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
