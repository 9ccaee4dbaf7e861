// One trajectory token by token: every id the model saw or wrote, coloured by one number at a time.
import { get, runPath } from "board/api.js";
import { fill, h } from "board/dom.js";
import { number } from "board/format.js";
import { setParams } from "board/router.js";
import { channelsOf } from "board/parts/channels.js";
import { TokenCursor } from "board/parts/token_cursor.js";
import { TokenText } from "board/parts/token_text.js";
import { placeOf, trajectoryHead } from "board/parts/trajectory_head.js";

export async function render(node, { run, params }) {
  fill(node, h("p", { class: "loading late", role: "status" }, "Loading the tokens…"));
  const place = placeOf(params);
  const [trajectory, data] = await Promise.all([get(runPath(run, "trajectory"), place), get(runPath(run, "tokens"), place)]);
  let head = trajectoryHead(run, trajectory, params, "tokens");
  const page = h("article", { class: "trajectory" }, head.node);
  fill(node, page);
  if (data.segments.length === 0) {
    page.append(h("p", { class: "empty" }, "No tokens were recorded: this came from an endpoint or a dump that has text only."));
    return () => head.stop();
  }
  // The colour changes without a new page; the links to neighbours and siblings take it along.
  const stop = tokenView(page, data, params.colour, (colour) => {
    setParams({ colour });
    head.stop();
    const next = trajectoryHead(run, trajectory, { ...params, colour }, "tokens");
    head.node.replaceWith(next.node);
    head = next;
  });
  return () => {
    head.stop();
    stop();
  };
}

/** The controls, the legend and the text; returns a function that stops what still runs. */
function tokenView(page, data, colour, onColour) {
  const channels = channelsOf(data);
  const text = new TokenText(data);
  const cursor = new TokenCursor(text);
  const legend = h("div", { class: "token-legend", role: "group", "aria-label": "colours" });
  const status = h("span", { class: "muted", role: "status" });
  const strip = channels.map((channel, index) =>
    h(
      "button",
      { type: "button", class: "colouring", "aria-pressed": "false", onClick: () => choose(channel.name) },
      index < 10 && h("kbd", null, String((index + 1) % 10)),
      channel.title,
    ),
  );
  const paint = (channel) => {
    strip.forEach((button, index) => button.setAttribute("aria-pressed", String(channels[index] === channel)));
    fill(legend, swatches(channel, text.paint(channel), text, cursor));
  };
  const choose = (name) => {
    paint(channels.find((channel) => channel.name === name));
    onColour(name);
  };
  const press = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select")) return;
    const channel = /^[0-9]$/.test(event.key) ? channels[(Number(event.key) + 9) % 10] : undefined;
    if (channel) choose(channel.name);
  };
  document.addEventListener("keydown", press);
  if (data.problem) page.append(h("p", { class: "failure" }, data.problem));
  page.append(
    h(
      "div",
      { class: "token-bar" },
      h("div", { class: "colourings", role: "group", "aria-label": "Colour by" }, strip),
      status,
      !data.ids_are_real && h("span", { class: "mark mark-warn", title: "the dump this was imported from had no ids" }, "ids are made up"),
      h("span", { class: "muted keys-note" }, "arrows move along the tokens"),
      legend,
    ),
    text.node,
    cursor.card,
  );
  paint(channels.find((channel) => channel.name === colour) ?? channels[0]);
  text.build((done, all) => {
    status.textContent = done < all ? `${number(done)} of ${number(all)} tokens…` : `${number(all)} tokens`;
    cursor.ready();
  });
  return () => {
    text.stop();
    document.removeEventListener("keydown", press);
  };
}

/** One button per bin with its colour, its range and how many tokens fell in; it jumps to the next of them. */
function swatches(channel, counts, text, cursor) {
  const jump = (bin) => {
    const place = text.nextIn(bin, cursor.place);
    if (place !== null) cursor.go(place);
  };
  return [
    h("span", { class: "legend-unit" }, channel.unit),
    channel.classes.map((name, bin) =>
      h(
        "button",
        {
          type: "button",
          class: "legend-bin",
          disabled: counts[bin] === 0,
          title: "go to the next token of this colour",
          onClick: () => jump(bin),
        },
        h("span", { class: `swatch ${name}`, "aria-hidden": "true" }),
        channel.labels[bin],
        h("span", { class: "legend-count" }, number(counts[bin])),
      ),
    ),
  ];
}
