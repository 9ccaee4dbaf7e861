// The first thing on a run's page: what it came to, what to watch, its best and worst episode, what it cost, its warnings.

import { get, runPath } from "board/api.js";
import { h, fill } from "board/dom.js";
import { count, number, percent, seconds } from "board/format.js";
import { watchWords } from "board/parts/run.js";
import { visible } from "board/parts/visible.js";
import { link } from "board/router.js";

/** A box that `show(body)` fills from the run's object: `const head = headline(run); node.append(head.node)`. */
export function headline(run) {
  const watch = h("div", { class: "figure" });
  const figures = h("dl", { class: "figures headline" });
  const warned = h("div", { class: "headline-warnings" });
  const show = (body) => {
    const { measures, cost, episodes } = body.headline;
    fill(figures, measures.map(course), watch, cost.learned && learnedFrom(run, body.shards), episodes && [episode(run, episodes, "best"), episode(run, episodes, "worst")], spent(cost));
    fill(warned, body.warnings.map(warning));
    if (body.pending) return;
    get(runPath(run, "watch")).then((found) => fill(watch, figure("To watch", toWatch(run, found), "what the checks of Health found")), (error) => console.warn(error));
  };
  return { node: h("section", { class: "headline-box", "aria-label": "Headline" }, figures, warned), show };
}

function course({ name, share, first, first_error: before, last, last_error: after, steps }) {
  const value = (x) => (share ? percent(x) : number(x));
  const said = first === null ? value(last) : [value(first), h("span", { class: "arrow" }, " → "), value(last)];
  const error = share && after !== null ? `± ${before === null ? "" : `${(100 * before).toFixed(1)} → `}${(100 * after).toFixed(1)}` : null;
  const where = steps === null || steps[1] === 0 ? null : first === null ? `at step ${number(steps[1])}` : `steps ${number(steps[0])} to ${number(steps[1])}`;
  return h("div", { class: "figure" }, figure(name[0].toUpperCase() + name.slice(1), said, [error, where].filter(Boolean).join(", ")));
}

function toWatch(run, found) {
  const words = watchWords(found);
  const tone = found.alarm ? "is-alarm" : words ? "is-watch" : "is-fine";
  return h("a", { class: tone, href: link(`/run/${run}/health`) }, words ?? "nothing");
}

function episode(run, { split, step, best, worst, count: episodes }, which) {
  const one = which === "best" ? best : worst;
  if (one === null) return null;
  const of = split === "train" ? `of step ${number(step)}` : step ? `of the evaluation at step ${number(step)}` : "of the evaluation";
  const title = worst === null ? `All ${number(episodes)} episodes ${of}` : `${which === "best" ? "Best" : "Worst"} episode ${of}`;
  const said = [h("span", { class: "figure-side" }, "reward "), number(one.reward)];
  return h("div", { class: "figure figure-episode" }, figure(title, h("a", { href: link(`/run/${run}/trajectory`, { shard: one.shard, row: one.row }) }, said), visible(one.question || one.sample_id)));
}

// Of a fine-tuning: the conversations, and one click away which of their tokens are in the loss.
function learnedFrom(run, shards) {
  const conversations = shards.filter((shard) => shard.split === "train" && shard.size > 0);
  if (!conversations.length) return null;
  const href = link(`/run/${run}/trajectory`, { shard: conversations[0].shard, row: 0, view: "tokens", colour: "mask" });
  const total = conversations.reduce((sum, shard) => sum + shard.size, 0);
  return h("div", { class: "figure" }, figure("Learns from", h("a", { href }, number(total), " conversations"), "which of their tokens are in the loss"));
}

function spent({ seconds: took, tokens, tokens_per_second: rate, learned }) {
  if (took === null && tokens === null) return null;
  const written = tokens ? `${count(tokens)} tokens ${learned ? "learned from" : "written"}` : null;
  return h("div", { class: "figure" }, figure("Cost", seconds(took), [written, rate ? `${count(Math.round(rate))} a second` : null].filter(Boolean).join(", ")));
}

const figure = (title, said, note) => [h("dt", null, title), h("dd", null, h("strong", null, said), note ? h("span", null, note) : null)];

/** What the run itself warned of, with its steps and how often. */
export function warning({ text, count: times, first_step: first, last_step: last }) {
  const steps = first === last ? (last ? `step ${number(last)}` : null) : `steps ${number(first)} to ${number(last)}`;
  const often = times > 1 ? `${number(times)} times` : null;
  const where = [steps, often].filter(Boolean).join(", ");
  return h("p", { class: "health-line is-watch", role: "note" }, "Warning: ", visible(text), where ? h("span", { class: "muted" }, ` (${where})`) : null);
}
