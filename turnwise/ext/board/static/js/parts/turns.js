// One turn of a conversation: what the policy wrote, the calls it made, what came back and how long it all took.
import { h } from "board/dom.js";
import { number, seconds, signed } from "board/format.js";
import { badge, callBadge, words } from "board/parts/badges.js";
import { argumentsOf, jsonBlock } from "board/parts/code.js";
import { turnTiming } from "board/parts/figures.js";
import { asWritten, body, messageCard, output, prose } from "board/parts/messages.js";
import { callImages, messageImages } from "board/parts/pictures.js";
import { visible } from "board/parts/visible.js";

function hasKeys(value) {
  return value !== null && typeof value === "object" && Object.keys(value).length > 0;
}

/** A reply's own images, unless the call lists them all with their provenance. */
function replyImages(call) {
  const images = call.reply?.images ?? [];
  return (call.images ?? []).length >= images.length ? null : messageImages(images);
}

/** What was wrong with a call, unless what the tool replied says it anyway. */
function problemOf(call) {
  const told = call.problem && call.reply?.text.includes(call.problem);
  return call.problem && !told ? h("p", { class: "problem" }, visible(call.problem)) : null;
}

/** What the policy asked for; of a call that could not be read there is only the text as it was written. */
function argumentsBlock(call) {
  if (call.problem && !hasKeys(call.arguments)) return null;
  return h("div", { class: "call-arguments" }, argumentsOf(call.arguments ?? {}));
}

function callCard(call, marks) {
  return h(
    "section",
    { class: `call call-${call.status === "ok" || call.status === "unknown" ? "ok" : "failed"}`, "aria-label": `call of ${call.name}` },
    h(
      "div",
      { class: "call-head" },
      h("span", { class: "call-name" }, visible(call.name || "(no name)")),
      callBadge(call.status),
      call.truncated && badge("output cut", "warn"),
      call.score !== null && call.score !== undefined && badge(`score ${number(call.score)}`, "accent"),
      h("span", { class: "call-seconds" }, seconds(call.seconds)),
    ),
    problemOf(call),
    argumentsBlock(call),
    h(
      "div",
      { class: "call-reply" },
      call.reply ? output(call.reply.text) : h("p", { class: "muted" }, "no reply: the episode ended here"),
      callImages(call, marks),
      replyImages(call),
    ),
    hasKeys(call.info) && h("details", { class: "more" }, h("summary", null, "recorded with the call"), jsonBlock(call.info)),
  );
}

function userScore(turn) {
  return turn.user_score !== null && turn.user_score !== undefined
    ? badge(`user score ${number(turn.user_score)}`, "accent", "what the simulated user thought of the turn")
    : null;
}

/** What a judge said of the turn, with its grade. */
function remarkCard(remark) {
  return h(
    "blockquote",
    { class: "verdict turn-remark" },
    h("cite", null, visible(remark.by), remark.value !== null && [" ", badge(number(remark.value), remark.value < 0 ? "bad" : "accent", "the grade of this turn")]),
    prose(remark.text),
  );
}

/** A turn with its replies. `longest` is the longest turn's time, `marks` what is drawn on images; `id` names it in the page. */
export function turnCard(turn, { longest, marks, version, id = `turn-${turn.index}` }) {
  const scores = Object.entries(turn.scores ?? {});
  const unparsed = turn.message.tool_calls.filter((asked) => !turn.calls.some((call) => call.id === asked.id));
  return h(
    "section",
    { class: "turn", id, "aria-label": `turn ${turn.index}` },
    h("div", { class: "turn-mark", "aria-hidden": "true" }, String(turn.index)),
    h(
      "div",
      { class: "turn-body" },
      h(
        "div",
        { class: "message role-assistant" },
        h(
          "div",
          { class: "message-head" },
          h("span", { class: "role" }, "Assistant"),
          h("span", { class: "muted" }, `turn ${turn.index} · ${number(turn.completion_tokens)} tokens`),
          turn.finish_reason === "length" && badge("cut at the token limit", "warn"),
          turn.policy_version !== version && badge(`policy ${turn.policy_version}`, "plain", "other weights than the first turn's"),
          userScore(turn),
          scores.map(([name, value]) => badge(`${words(name)} ${signed(value)}`, value < 0 ? "bad" : "accent")),
        ),
        body(turn.message, marks),
        turn.calls.map((call) => callCard(call, marks)),
        unparsed.map((asked) =>
          h(
            "section",
            { class: "call call-failed" },
            h(
              "div",
              { class: "call-head" },
              h("span", { class: "call-name" }, visible(asked.name || "(no name)")),
              badge("never answered", "warn"),
            ),
            problemOf(asked),
            argumentsBlock(asked),
          ),
        ),
        (turn.remarks ?? []).map(remarkCard),
        asWritten(turn.message),
        turnTiming(turn, longest),
      ),
      turn.replies.map((reply) => messageCard(reply, marks, reply.role === "user" && h("span", { class: "muted" }, "feedback"))),
    ),
  );
}
