// One episode before and after a probe: the same question twice, turn beside turn, with the image that was another.
import { get, runPath } from "board/api.js";
import { fill, h } from "board/dom.js";
import { number } from "board/format.js";
import { looseImages } from "board/pages/conversation.js";
import { rightBadge, words } from "board/parts/badges.js";
import { messageCard } from "board/parts/messages.js";
import { marksOf, targetToggle } from "board/parts/pictures.js";
import { probeTitle } from "board/parts/probes.js";
import { questionTitle } from "board/parts/question.js";
import { placeOf } from "board/parts/trajectory_head.js";
import { turnCard } from "board/parts/turns.js";
import { visible } from "board/parts/visible.js";
import { link, setParams } from "board/router.js";

function noPair(reason) {
  return Object.assign(new Error(reason), { answer: { title: "No such pair of trajectories" } });
}

export async function render(node, { run, params }) {
  fill(node, h("p", { class: "loading late", role: "status" }, "Loading both episodes…"));
  const before = await get(runPath(run, "trajectory"), placeOf(params));
  const names = Object.keys(before.probes).filter((name) => name !== "none");
  const probe = params.probe && names.includes(params.probe) ? params.probe : names[0];
  if (!probe || (params.probe && probe !== params.probe)) throw noPair("This episode was not played under such a probe.");
  const place = before.probes[probe];
  const after = await get(runPath(run, "trajectory"), { shard: place.shard, row: String(place.row) });
  const article = h("article", { class: ["trajectory", params.targets && "show-targets"] });
  const toggle = targetToggle(before.targets, Boolean(params.targets), (on) => {
    article.classList.toggle("show-targets", on);
    setParams({ targets: on ? "1" : null });
  });
  fill(article, head(run, before, names, probe, params, toggle), grid(run, [["none", before], [probe, after]]));
  fill(node, article);
  return () => {};
}

function head(run, data, names, probe, params, toggle) {
  const to = (name) => link(`/run/${run}/beside`, { shard: data.shard, row: data.row, probe: name, targets: params.targets });
  return h(
    "header",
    { class: "trajectory-head" },
    h("div", { class: "head-line" }, h("a", { class: "back", href: link(`/run/${run}/curves`) }, "← Probe"), h("span", { class: "muted" }, visible(data.entry.data_source))),
    questionTitle(run, data.entry.question, data.entry.sample_id, "Before and after"),
    h(
      "div",
      { class: "head-line tabs-line" },
      h("nav", { class: "views", "aria-label": "probe" }, names.map((name) => h("a", { href: to(name), "aria-current": name === probe ? "page" : null }, probeTitle(name, true)))),
      toggle,
    ),
  );
}

/** Both sides in one grid, so that a turn stands beside itself; on a narrow screen one side follows the other. */
function grid(run, sides) {
  const marks = sides.map(([, data]) => marksOf(data));
  const turns = Math.max(...sides.map(([, data]) => data.turns.length));
  const longest = Math.max(0, ...sides.flatMap(([, data]) => data.turns.map((turn) => (turn.generate_seconds ?? 0) + (turn.reply_seconds ?? 0))));
  const cell = (side, ...content) => h("div", { class: "beside-cell", style: { "--side": String(side) } }, content);
  return h(
    "div",
    { class: "beside-grid" },
    h("div", { class: "whole" }, sides[0][1].prompt.map((message) => messageCard(message, marks[0])), looseImages(sides[0][1], marks[0])),
    sides.map(([name, data], side) => sideHead(run, name, data, side)),
    Array.from({ length: turns }, (_, index) =>
      sides.map(([, data], side) =>
        cell(side, data.turns[index] ? turnCard(data.turns[index], { longest, marks: marks[side], version: data.turns[0].policy_version, id: `side-${side}-turn-${index}` }) : h("p", { class: "muted" }, "no such turn")),
      ),
    ),
    sides.map(([, data], side) => cell(side, h("p", { class: "beside-end" }, `ended: ${words(data.stop_reason)}`))),
  );
}

function sideHead(run, name, data, side) {
  return h(
    "div",
    { class: "beside-side", style: { "--side": String(side) } },
    h("h2", null, probeTitle(name)),
    h(
      "div",
      { class: "outcome" },
      rightBadge(data.entry.right),
      h("span", null, "reward ", h("b", null, number(data.reward))),
      h("span", null, "answer ", h("b", { dir: "auto" }, visible(data.entry.answer || "(none)"))),
      h("a", { href: link(`/run/${run}/trajectory`, { shard: data.shard, row: data.row }) }, "the whole trajectory"),
    ),
  );
}
