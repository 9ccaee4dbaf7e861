// An episode played again: how a replay differs from its record, and the form that asks for another.
import { frozen, get, post, runPath } from "board/api.js";
import { fill, h } from "board/dom.js";
import { number } from "board/format.js";
import { words } from "board/parts/badges.js";
import { codeBlock } from "board/parts/code.js";
import { visible } from "board/parts/visible.js";
import { link } from "board/router.js";

/** What a replay found: where it parts from its record, and what was said on either side. */
export function replayFound(replay) {
  const found = replay.differences;
  const place = found.parted;
  const [before, after] = found.rewards;
  const of = replay.of ?? {};
  return h(
    "div",
    { class: "replay-found" },
    replay.of_run && h("p", null, "of ", h("a", { href: link(`/run/${replay.of_run}/trajectory`, { shard: of.file, row: of.row }) }, visible(`${replay.of_run}, row ${of.row}`))),
    h("p", { class: "replay-parted" }, place ? `The tokens part at token ${place.token} of segment ${place.segment}, in turn ${place.turn}.` : "The same tokens, all of them."),
    h("p", null, `Reward ${number(before)} → ${number(after)}, ended: ${words(found.stop_reasons[0])} → ${words(found.stop_reasons[1])}`),
    (replay.notes ?? []).map((note) => h("p", { class: "muted" }, visible(note))),
    found.said.filter((one) => !one.same).map(saidTwice),
  );
}

function saidTwice(one) {
  const side = (text, name) => h("div", { class: `replay-side replay-${name}` }, h("span", { class: "muted" }, name), text === null ? h("p", { class: "muted" }, "nothing") : codeBlock(text));
  return h("div", { class: "replay-said" }, h("h3", null, `turn ${one.turn}, ${visible(one.who)}`), side(one.before, "before"), side(one.after, "after"));
}

/** The form of a board that may replay; any other says the command that does it. */
export function replayForm(run, data) {
  const command = `turnwise replay runs/${run} --file ${data.shard} --sample ${data.row}`;
  const box = h("div", { class: "replay-form" }, h("p", { class: "muted" }, "On the command line; with --edit turn=N --with TEXT from another message on:"), codeBlock(command));
  if (!frozen) get("/api/replay").then((body) => { if (body.allowed) fill(box, form(run, data)); }, (error) => box.append(h("p", { class: "error", role: "alert" }, error.message)));
  return box;
}

function form(run, data) {
  const places = [{ label: "as it was", edit: null, text: "" }, ...data.turns.flatMap(placesOf)];
  const where = h("select", { "aria-label": "From where" }, places.map((place, index) => h("option", { value: index }, place.label)));
  const text = h("textarea", { rows: 4, maxLength: 100000, hidden: true, "aria-label": "What is said there instead" });
  const found = h("div", { role: "status" });
  const button = h("button", { type: "submit" }, "Play it again");
  where.addEventListener("change", () => {
    const place = places[where.value];
    text.value = place.text;
    text.hidden = place.edit === null;
  });
  const submit = async (event) => {
    event.preventDefault();
    const place = places[where.value];
    button.disabled = true;
    fill(found, h("p", { class: "muted" }, "Loading the model and playing…"));
    try {
      const made = await post(runPath(run, "replay"), { shard: data.shard, row: data.row, ...(place.edit === null ? {} : { edit: place.edit, text: text.value }) });
      fill(found, h("p", null, h("a", { href: link(`/run/${made.run}/trajectory`, { shard: "eval/step_000000", row: 0 }) }, "Open the replay")), replayFound({ ...made, of_run: null }));
    } catch (error) {
      fill(found, h("p", { class: "error", role: "alert" }, error.message));
    }
    button.disabled = false;
  };
  return h("form", { onSubmit: submit }, h("label", { class: "field" }, "From ", where), text, button, found);
}

// What can be said otherwise in one turn: its own words, each reply, or a word of the user's where nobody replied.
function placesOf(turn) {
  const own = { label: `turn ${turn.index}: the assistant's words`, edit: `turn=${turn.index},assistant`, text: turn.message.text };
  if (turn.replied.length === 0) return [own, { label: `turn ${turn.index}: a word of the user's`, edit: `turn=${turn.index}`, text: "" }];
  return [own, ...turn.replied.map(([list, index], at) => {
    const reply = list === "calls" ? turn.calls[index].reply : turn.replies[index];
    const who = list === "calls" ? `result of ${visible(turn.calls[index].name)}` : `the ${reply.role}'s words`;
    return { label: `turn ${turn.index}: ${who}`, edit: `turn=${turn.index},call=${at}`, text: reply.text };
  })];
}
