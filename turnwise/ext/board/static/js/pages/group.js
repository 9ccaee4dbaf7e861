// All siblings of one sample side by side: their rewards and advantages, their answers, their turns aligned.
import { get, runPath } from "board/api.js";
import { fill, h } from "board/dom.js";
import { number, percent, seconds, signed } from "board/format.js";
import { link } from "board/router.js";
import { badge, deltaBar, rightBadge, stopBadge } from "board/parts/badges.js";
import { codeBlock, jsonBlock } from "board/parts/code.js";
import { copyableId } from "board/parts/copy.js";
import { alignedTurns, answersOf } from "board/parts/siblings.js";
import { messageCard } from "board/parts/messages.js";
import { questionTitle } from "board/parts/question.js";
import { backToList } from "board/parts/trail.js";
import { visible } from "board/parts/visible.js";

export async function render(node, { run, params }) {
  fill(node, h("p", { class: "loading late", role: "status" }, "Loading the group…"));
  if (!params.shard || !params.sample)
    throw Object.assign(new Error("This address names no group: it needs a file (shard) and a sample in it."), { answer: { title: "No such group" } });
  const data = await get(runPath(run, "group"), { shard: params.shard, sample: params.sample });
  const answers = answersOf(data.siblings);
  fill(
    node,
    h(
      "article",
      { class: "group-page" },
      head(run, data, params),
      h("div", { class: "group-top" }, question(data), outcome(data, answers)),
      sideBySide(run, data, params, answers),
    ),
  );
  return () => {};
}

function head(run, data, params) {
  return h(
    "header",
    { class: "trajectory-head" },
    h(
      "div",
      { class: "head-line" },
      h("a", { class: "back", href: backToList(run) }, "← Trajectories"),
      h("span", { class: "muted" }, `${params.shard}`),
      h(
        "span",
        { class: "moves" },
        h("a", { class: "button", href: link(`/run/${run}/sample`, { sample: params.sample }) }, "Over steps and runs"),
      ),
    ),
    questionTitle(run, data.question, data.sample_id, "Group"),
    h(
      "div",
      { class: "outcome" },
      h("span", null, h("b", null, number(data.size)), " siblings of ", visible(data.data_source), ", sample ", copyableId(data.sample_id)),
      h("span", null, "reward ", h("b", null, number(data.mean)), " ± ", number(data.std)),
      Object.entries(data.pass_at_k).map(([k, value]) => h("span", null, `pass@${k} `, h("b", null, percent(value, 0)))),
      data.size > data.siblings.length && badge(`the first ${data.siblings.length} are shown`, "warn"),
      data.zero_variance && badge("zero variance: nothing to learn here", "warn", "all rewards are equal, so every advantage is zero"),
    ),
  );
}

/** The prompt once: it is the same for all. */
function question(data) {
  const truth = data.ground_truth;
  return h(
    "section",
    { class: "group-question", "aria-label": "question" },
    data.prompt.map((message) => messageCard(message)),
    h("h2", null, "Ground truth"),
    truth === null || truth === undefined
      ? h("p", { class: "muted" }, "none recorded")
      : typeof truth === "string"
        ? codeBlock(truth)
        : jsonBlock(truth),
  );
}

function widest(siblings, field) {
  return Math.max(0, ...siblings.map((sibling) => Math.abs(sibling[field] ?? 0)));
}

/** Rewards and advantages as bars, and which answers were given how often. */
function outcome(data, answers) {
  const most = { reward: widest(data.siblings, "reward"), advantage: widest(data.siblings, "advantage") };
  const row = (sibling) =>
    h(
      "tr",
      null,
      h(
        "th",
        { scope: "row" },
        h(
          "a",
          {
            href: `#sibling-${sibling.sibling}`,
            onClick: (event) => {
              event.preventDefault(); // the hash is the router's
              document.getElementById(`sibling-${sibling.sibling}`)?.scrollIntoView({ block: "nearest", inline: "start" });
            },
          },
          `#${sibling.sibling}`,
        ),
      ),
      h("td", null, rightBadge(sibling.right)),
      h("td", null, deltaBar(sibling.reward, most.reward, number(sibling.reward))),
      h("td", null, deltaBar(sibling.advantage, most.advantage)),
      h("td", { class: "answer-cell" }, answerChip(answers, sibling)),
    );
  return h(
    "section",
    { class: "group-outcome", "aria-label": "outcome of each sibling" },
    h(
      "div",
      { class: "scroll" },
      h(
        "table",
        { class: "outcomes" },
        h(
          "thead",
          null,
          h(
            "tr",
            null,
            ["", "", "Reward", "Advantage", "Answer"].map((title) => h("th", { scope: "col" }, title)),
          ),
        ),
        h("tbody", null, data.siblings.map(row)),
      ),
    ),
    h(
      "p",
      { class: "answer-count" },
      answers.distinct.length === 1 ? "All gave the same answer." : `${answers.distinct.length} different answers: `,
      answers.distinct.length > 1 &&
        answers.distinct.map((answer) =>
          h("span", { class: "answer-share" }, h("span", { class: `answer-key key-${answer.key}` }, answer.letter), ` ${answer.count}×`),
        ),
    ),
  );
}

function answerChip(answers, sibling) {
  const answer = answers.of(sibling);
  return h(
    "span",
    { class: "answer-chip", title: `given by ${answer.count} of ${answers.all}` },
    h("span", { class: `answer-key key-${answer.key}` }, answer.letter),
    h("span", { dir: "auto" }, answer.text === "" ? h("i", null, "no answer") : visible(answer.text)),
  );
}

function siblingHead(run, sibling, params, answers, column) {
  return h(
    "div",
    { class: "sibling-head", id: `sibling-${sibling.sibling}`, style: { "--column": String(column) } },
    h(
      "div",
      { class: "head-line" },
      h(
        "a",
        { class: "sibling-link", href: link(`/run/${run}/trajectory`, { shard: params.shard, row: sibling.row }) },
        `#${sibling.sibling}`,
      ),
      rightBadge(sibling.right),
      stopBadge(sibling.stop_reason),
    ),
    h(
      "div",
      { class: "outcome small" },
      h("span", null, "reward ", h("b", null, number(sibling.reward))),
      h("span", null, "adv. ", h("b", null, signed(sibling.advantage))),
      h("span", { class: "muted" }, `${sibling.turns} turns · ${number(sibling.policy_tokens)} tokens · ${seconds(sibling.seconds)}`),
    ),
    sibling.failure && h("p", { class: "failure" }, visible(sibling.failure)),
    answerChip(answers, sibling),
  );
}

function sideBySide(run, data, params, answers) {
  const rows = alignedTurns(data.siblings);
  const grid = h(
    "div",
    { class: "siblings-grid", style: { "--siblings": String(data.siblings.length) } },
    data.siblings.map((sibling, column) => siblingHead(run, sibling, params, answers, column)),
    rows.map((cells, turn) =>
      cells.map((cell, column) =>
        h(
          "div",
          {
            class: cell.messages.length > 0 ? "cell" : "cell over",
            "aria-label": `turn ${turn}`,
            style: { "--column": String(column) }, // on paper one sibling follows the other
          },
          cell.messages.map((message, index) =>
            messageCard(message, undefined, index === 0 && cell.sameAs !== null && badge(`same as #${cell.sameAs}`, "plain", "word for word")),
          ),
          cell.messages.length === 0 && h("span", { class: "muted" }, "–"),
        ),
      ),
    ),
  );
  return h(
    "section",
    { class: "siblings-box scroll", tabindex: "0", role: "region", "aria-label": "siblings side by side, scrolls" },
    grid,
  );
}
