// The head of a trajectory's two pages: what it is, its outcome, the way to its neighbours and siblings, and the keys.
import { h } from "board/dom.js";
import { number, seconds, signed } from "board/format.js";
import { link } from "board/router.js";
import { badge, rightBadge, stopBadge } from "board/parts/badges.js";
import { copyButton, copyableId } from "board/parts/copy.js";
import { questionTitle } from "board/parts/question.js";
import { backToList, onTrail } from "board/parts/trail.js";
import { visible } from "board/parts/visible.js";

const TYPING = "input, textarea, select, [contenteditable]";
// Inside these the arrow keys scroll or move already.
const OWN_ARROWS = ".token, .output, pre, .scroll-box, details, summary";

/** Which trajectory an address names: {shard, row}; an error with a title of its own when it names none. */
export function placeOf({ shard, row }) {
  if (shard && /^\d{1,8}$/.test(row ?? "")) return { shard, row };
  throw Object.assign(new Error("This address names no trajectory: it needs a file (shard) and a row in it."), { answer: { title: "No such trajectory" } });
}

function neighbour(place, label, key, address) {
  const attributes = { class: "button", title: `${label.toLowerCase()} trajectory (${key})` };
  const arrow = key === "k" ? "←" : "→";
  if (place === null) return h("span", { ...attributes, class: "button off", "aria-disabled": "true" }, `${arrow} ${label}`);
  return h("a", { ...attributes, href: address(place), rel: key === "k" ? "prev" : "next" }, `${arrow} ${label}`);
}

function siblingLinks(data, address) {
  const rows = data.siblings;
  if (rows.length < 2) return null;
  return h(
    "nav",
    { class: "siblings", "aria-label": "siblings" },
    h("span", { class: "muted" }, "siblings"),
    rows.map((row, index) =>
      h(
        "a",
        { href: address({ shard: data.shard, row }), "aria-current": row === data.row ? "page" : null, title: `sibling in row ${row}` },
        String(index),
      ),
    ),
  );
}

/** The moves of a page: which trajectory is before and after this one, and whose order that is. */
function moves(run, data) {
  const trail = onTrail(run, data.shard, data.row);
  if (trail !== null)
    return { previous: trail.previous, next: trail.next, note: `${number(trail.position)} of ${number(trail.matched)} in your list` };
  const place = (row) => (row === null || row === undefined ? null : { shard: data.shard, row });
  return { previous: place(data.neighbours.previous), next: place(data.neighbours.next), note: `row ${data.row} of ${data.shard}` };
}

/** Listens for j, k and the arrows; returns a function that stops. */
function keys(previous, next, address) {
  const press = (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || event.target.closest(TYPING)) return;
    const arrow = event.key === "ArrowLeft" || event.key === "ArrowRight";
    if (arrow && event.target.closest(OWN_ARROWS)) return;
    const place = event.key === "j" || event.key === "ArrowRight" ? next : event.key === "k" || event.key === "ArrowLeft" ? previous : null;
    if (place === null) return;
    event.preventDefault();
    location.hash = address(place);
  };
  document.addEventListener("keydown", press);
  return () => document.removeEventListener("keydown", press);
}

/** The head and a function that ends its key listener: {node, stop}. `view` is "" or "tokens". */
export function trajectoryHead(run, data, params, view) {
  const entry = data.entry;
  const kept = { view: params.view, colour: params.colour };
  const address = (place) => link(`/run/${run}/trajectory`, { shard: place.shard, row: place.row, ...kept });
  const tab = (name, label) =>
    h(
      "a",
      {
        href: link(`/run/${run}/trajectory`, { shard: data.shard, row: data.row, view: name, colour: params.colour }),
        "aria-current": view === name ? "page" : null,
      },
      label,
    );
  const { previous, next, note } = moves(run, data);
  const node = h(
    "header",
    { class: "trajectory-head" },
    h(
      "div",
      { class: "head-line" },
      h("a", { class: "back", href: backToList(run) }, "← Trajectories"),
      h("span", { class: "muted" }, note),
      h("span", { class: "moves" }, neighbour(previous, "Previous", "k", address), neighbour(next, "Next", "j", address)),
    ),
    questionTitle(run, entry.question, entry.sample_id),
    h(
      "div",
      { class: "outcome" },
      rightBadge(entry.right),
      entry.first_right !== null &&
        entry.first_right !== entry.right &&
        badge(entry.first_right ? "first answer was right" : "first answer was wrong", "warn"),
      h("span", null, "reward ", h("b", null, number(data.reward))),
      h("span", null, "advantage ", h("b", null, signed(entry.advantage))),
      stopBadge(data.stop_reason),
      h(
        "span",
        { class: "muted" },
        `step ${entry.step} · sibling ${entry.sibling} · `,
        visible(entry.data_source),
        ` · ${seconds(entry.seconds)} · sample `,
        copyableId(entry.sample_id),
      ),
    ),
    data.failure && h("p", { class: "failure", role: "alert" }, h("b", null, "Failed: "), visible(data.failure)),
    h(
      "div",
      { class: "head-line tabs-line" },
      h("nav", { class: "views", "aria-label": "view" }, tab("", "Conversation"), tab("tokens", "Tokens")),
      siblingLinks(data, address),
      h(
        "span",
        { class: "moves" },
        h("a", { class: "button", href: link(`/run/${run}/group`, { shard: data.shard, sample: entry.sample_id }) }, "Group"),
        h(
          "a",
          {
            class: "button",
            href: link(`/run/${run}/sample`, { sample: entry.sample_id }),
            title: "this sample at every step it was played, and in other runs",
          },
          "Over steps and runs",
        ),
        copyButton(data, "Copy as JSON"),
      ),
    ),
  );
  return { node, stop: keys(previous, next, address) };
}
