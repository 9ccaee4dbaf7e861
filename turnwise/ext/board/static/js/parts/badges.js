// Small coloured words for outcomes: right or wrong, how a call ended, why an episode stopped.
import { h } from "board/dom.js";
import { signed } from "board/format.js";
import { visibleText } from "board/parts/visible.js";

const STATUS_TONES = {
  ok: "good",
  error: "bad",
  crashed: "bad",
  timeout: "bad",
  malformed: "warn",
  unknown_tool: "warn",
  bad_arguments: "warn",
  refused: "warn",
};
const STOP_TONES = { answered: "plain", user_ended: "plain", failed: "bad" };

/** A word in a tone: good, warn, bad, plain or accent. */
export function badge(text, tone = "plain", title = null) {
  return h("span", { class: `mark mark-${tone}`, title }, visibleText(String(text)));
}

/** "user_ended" as a person writes it. */
export function words(name) {
  return String(name).replaceAll("_", " ");
}

export function rightBadge(right) {
  if (right === true) return badge("✓ right", "good");
  if (right === false) return badge("✗ wrong", "bad");
  return badge("not graded", "plain");
}

export function callBadge(status) {
  return badge(words(status), STATUS_TONES[status] ?? "warn");
}

export function stopBadge(reason) {
  return badge(words(reason), STOP_TONES[reason] ?? "warn", "why the episode ended");
}

/** A bar to the left or right of zero with its number: advantages, rewards. `widest` is the largest size in view. */
export function deltaBar(value, widest, text = signed(value)) {
  const known = typeof value === "number";
  const share = known && widest > 0 ? Math.min(1, Math.abs(value) / widest) * 50 : 0;
  const start = known && value < 0 ? 50 - share : 50;
  return h(
    "span",
    { class: "delta" },
    h(
      "span",
      { class: "delta-track", "aria-hidden": "true" },
      h("span", { class: known && value < 0 ? "delta-fill minus" : "delta-fill", style: { left: `${start}%`, width: `${share}%` } }),
    ),
    h("span", { class: "delta-number" }, text),
  );
}
