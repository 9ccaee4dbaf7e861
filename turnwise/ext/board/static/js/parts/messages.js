// One message of a conversation as a card in its role's colour.
import { h } from "board/dom.js";
import { count } from "board/format.js";
import { badge } from "board/parts/badges.js";
import { argumentsOf, codeBlock } from "board/parts/code.js";
import { NO_MARKS, messageImages } from "board/parts/pictures.js";
import { promptFold } from "board/parts/prompt_fold.js";
import { visible } from "board/parts/visible.js";

const ROLES = { system: "System", user: "User", assistant: "Assistant", tool: "Tool" };
// A longer tool reply stands in a box of its own that scrolls; a longer system prompt starts folded.
const LONG = 1200;
const LONG_SYSTEM = 200;

/** Text as it was written: white space kept, direction decided by the text itself. */
export function prose(text, extra = "") {
  return h("div", { class: `prose ${extra}`, dir: "auto" }, visible(text));
}

/** A reply's text; a long one scrolls in its own box, reachable by keyboard. */
export function output(text) {
  if (text === "") return h("p", { class: "muted" }, "(empty)");
  const box = h("div", { class: "output", dir: "auto" }, visible(text));
  if (text.length > LONG || text.split("\n").length > 16) {
    box.classList.add("long");
    box.tabIndex = 0;
    box.setAttribute("role", "region");
    box.setAttribute("aria-label", "output, scrolls");
  }
  return box;
}

function preview(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > 90 ? `${line.slice(0, 90)}…` : line;
}

/** Reasoning, folded: its first words and its length are the summary. */
export function reasoning(text, open = false) {
  if (text === null || text === undefined || text === "") return null;
  return h(
    "details",
    { class: "reasoning", open },
    h(
      "summary",
      null,
      h("b", null, "Reasoning"),
      h("span", { class: "muted" }, ` ${count(text.length)} characters `),
      h("span", { class: "preview" }, visible(preview(text))),
    ),
    prose(text),
  );
}

/** What the policy wrote, character by character, when the card shows less than that; open where a call could not be read. */
export function asWritten(message) {
  const shown = message.answer ?? message.text;
  if (message.role !== "assistant" || shown === message.text) return null;
  return h("details", { class: "as-written", open: message.tool_calls.some((call) => call.problem) }, h("summary", null, "as written"), codeBlock(message.text));
}

/** The words of a message without its frame. */
export function body(message, marks = NO_MARKS) {
  const said = message.role === "assistant" ? (message.answer ?? message.text) : message.text;
  return [
    messageImages(message.images, marks),
    reasoning(message.reasoning),
    said.trim() !== "" && (message.role === "tool" ? output(said) : prose(said)),
  ];
}

/** The calls a message asks for, short: name and arguments. */
function asked(message) {
  return (message.tool_calls ?? []).map((call) =>
    h(
      "section",
      { class: "call" },
      h(
        "div",
        { class: "call-head" },
        h("span", { class: "call-name" }, visible(call.name || "(no name)")),
        call.problem && badge("malformed", "warn", call.problem),
      ),
      h("div", { class: "call-arguments" }, argumentsOf(call.arguments ?? {})),
    ),
  );
}

/** A message in its frame; a long system prompt starts folded. */
export function messageCard(message, marks = NO_MARKS, extra = null) {
  const name = message.name && message.role !== "assistant" ? ` · ${message.name}` : "";
  const title = [h("span", { class: "role" }, ROLES[message.role] ?? message.role, visible(name)), extra];
  const attributes = { class: `message role-${message.role}` };
  if (message.role === "system") {
    const short = message.text.length <= LONG_SYSTEM;
    const summary = [title, !short && h("span", { class: "preview" }, visible(preview(message.text)))];
    return promptFold(attributes, { summary, headed: { class: "message-head" }, short }, body(message, marks));
  }
  return h("div", attributes, h("div", { class: "message-head" }, title), body(message, marks), asked(message));
}
