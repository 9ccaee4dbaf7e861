// The episodes that no file has yet: what was said so far in those being played, and those that wait for their step.

import { get, runPath } from "board/api.js";
import { h, fill } from "board/dom.js";
import { ago, number, seconds } from "board/format.js";
import { rightBadge, stopBadge } from "board/parts/badges.js";
import { visible } from "board/parts/visible.js";

export async function render(node, { run, live }) {
  const tally = h("span", { class: "muted", role: "status" });
  const body = h("div", { class: "underway" });
  const opened = new Set();
  fill(node, h("div", { class: "page-head" }, h("h1", null, "Episodes under way"), tally), h("p", { class: "lead" }, "They are read a few seconds after they were said; a finished one moves to Trajectories when its step is recorded."), body);
  const draw = async () => {
    const { playing, finished, episodes } = await get(runPath(run, "underway"));
    for (const one of body.querySelectorAll("details")) {
      if (one.open) opened.add(one.dataset.id);
      else opened.delete(one.dataset.id);
    }
    fill(tally, underwayWords({ playing, finished }) ?? "none just now");
    fill(body, episodes.length ? episodes.map((episode) => card(episode, opened)) : h("p", { class: "empty" }, "Nothing is being played. Steps of less than a few seconds are over before they show here."));
    const left = playing + finished - episodes.length;
    if (left > 0) body.append(h("p", { class: "muted" }, `and ${number(left)} more`));
  };
  await draw();
  live(draw);
  return () => {};
}

/** "12 being played, 20 finished"; null when there is none. */
export function underwayWords({ playing, finished }) {
  return [playing && `${number(playing)} being played`, finished && `${number(finished)} finished`].filter(Boolean).join(", ") || null;
}

function card(episode, opened) {
  const id = `${episode.sample_id}/${episode.sibling}/${episode.started}`;
  const over = "stop_reason" in episode;
  const last = episode.messages.at(-1);
  const turns = `${number(episode.turns)} turn${episode.turns === 1 ? "" : "s"}`;
  return h("details", { class: "panel underway-episode", dataset: { id }, open: opened.has(id) },
    h("summary", null,
      over ? [stopBadge(episode.stop_reason), rightBadge(episode.right), h("span", { class: "muted" }, `reward ${number(episode.reward)} · ${turns} · ${seconds(episode.seconds)}`)]
        : [h("span", { class: "badge", dataset: { state: "running" } }, "being played"), h("span", { class: "muted" }, `${turns} · began `, h("span", { dataset: { updated: episode.started } }, ago(episode.started)))],
      h("span", { class: "muted" }, episode.evaluation ? "evaluation · " : "", visible(episode.sample_id), episode.sibling ? ` (${number(episode.sibling + 1)})` : null),
      h("p", { class: "underway-said" }, visible(episode.question.slice(0, 300))),
      last && h("p", { class: "underway-said muted" }, visible(`${last.role}: ${last.text.slice(0, 300)}`))),
    episode.failure ? h("p", { class: "error" }, visible(String(episode.failure))) : null,
    episode.before ? h("p", { class: "muted" }, `${number(episode.before)} earlier messages are left out`) : null,
    episode.messages.map(said));
}

function said({ role, name, text, calls, images }) {
  const about = [name && visible(name), calls.length ? ["calls ", visible(calls.join(", "))] : null, images ? `${number(images)} images` : null].filter(Boolean);
  return h("div", { class: `underway-message is-${role}` }, h("h3", null, visible(role), about.map((one) => h("span", { class: "muted" }, " · ", one))), h("pre", null, visible(text)));
}
