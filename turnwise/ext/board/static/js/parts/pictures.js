// Images with the parts that tools cut out of them drawn as numbered boxes over the source, and where the evidence lies.
import { h, svg } from "board/dom.js";
import { badge } from "board/parts/badges.js";
import { visible, visibleText } from "board/parts/visible.js";

const SMALL = 160; // pixels: a smaller image is shown by whole multiples, so that its own pixels can be seen
const LONG = 80;
const ROOM = 0.12; // of its height above a box: enough for its number
const WAYS = {
  verified: ["checked", "good", "the host knows from the pixels which part of its source this is"],
  unverified: ["unverified", "warn", "no more than what the code says about its image"],
  contradicted: ["contradicted", "bad", "the pixels are not those of the part that the code names"],
};
export const NO_MARKS = { crops: [], targets: [], sources: new Set() };

/** What is drawn on the images of a trajectory: its crops in order, numbered from 1, and the boxes of the ground truth. */
export function marksOf(data) {
  const crops = [];
  for (const turn of [...data.turns, ...data.branches.flatMap((branch) => branch.turns)]) {
    for (const call of turn.calls) {
      for (const image of call.images ?? []) if (image.box) crops.push({ number: crops.length + 1, call, image });
    }
  }
  return { crops, targets: data.targets ?? [], sources: new Set((data.sources ?? []).map((source) => source.url)) };
}

/** What of a box lies on an image of this size; null when nothing does. */
export function onImage([left, top, right, bottom], [width, height]) {
  const box = [Math.max(0, left), Math.max(0, top), Math.min(width, right), Math.min(height, bottom)];
  return box[0] < box[2] && box[1] < box[3] ? box : null;
}

/** Where a box of the source lies in an image whose pixel (x, y) shows (ax + by + c, dx + ey + f) of it; null when that is unknown. */
export function throughMatrix([left, top, right, bottom], matrix) {
  if (!matrix) return null;
  const [a, b, c, d, e, f] = matrix;
  const area = a * e - b * d;
  if (!Number.isFinite(1 / area)) return null;
  const corners = [[left, top], [right, top], [left, bottom], [right, bottom]].map(([x, y]) => [(e * (x - c) - b * (y - f)) / area, (a * (y - f) - d * (x - c)) / area]);
  const [xs, ys] = [corners.map(([x]) => x), corners.map(([, y]) => y)];
  return [Math.min(...xs), Math.min(...ys), Math.max(...xs), Math.max(...ys)];
}

function overlay(boxes, size) {
  const [width, height] = size;
  const frame = svg("svg", { class: "boxes", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  const labels = [];
  for (const { number, box, tone } of boxes) {
    const seen = onImage(box, size);
    if (seen === null) continue;
    const [left, top, right, bottom] = seen;
    const at = { x: left, y: top, width: right - left, height: bottom - top };
    frame.append(svg("rect", { ...at, class: `box-halo ${tone}` }), svg("rect", { ...at, class: `box-line ${tone}` }));
    const place = { left: `${(100 * left) / width}%`, top: `${(100 * top) / height}%` };
    const above = top > ROOM * height && "above"; // a number inside would hide what a small box shows
    if (number) labels.push(h("span", { class: ["box-label", tone, above], style: place }, String(number)));
  }
  return [frame, ...labels];
}

function edges(box) {
  return box.map((edge) => Math.round(edge)).join(", ");
}

/** One image, its boxes ([{number, box, tone}], in pixels of an image of this `size`, else of its own) and a caption; a click shows it larger. */
export function picture(url, caption, boxes = [], size = null, what = "image of the conversation") {
  if (!url) {
    return h(
      "figure",
      { class: "picture missing" },
      h("div", { class: "picture-missing" }, "image not kept in the run"),
      h("figcaption", null, caption),
    );
  }
  const numbered = boxes.filter((one) => one.number);
  const where = numbered.map(({ number, box }) => `${number}: ${edges(box)}`).join("; ");
  const image = h("img", { src: url, alt: where ? `${what}, with boxes ${where}` : what, decoding: "async" });
  const frame = h(
    "button",
    {
      class: "picture-frame",
      type: "button",
      "aria-expanded": "false",
      title: "show larger or smaller",
      onClick: () => frame.setAttribute("aria-expanded", String(figure.classList.toggle("large"))),
    },
    image,
  );
  const figure = h("figure", { class: "picture" }, frame, h("figcaption", null, caption));
  const loaded = () => {
    const own = [image.naturalWidth, image.naturalHeight];
    const times = Math.min(8, Math.floor(SMALL / Math.max(...own)));
    if (times > 1) {
      image.classList.add("small-image");
      image.style.width = `${times * own[0]}px`;
    }
    if (boxes.length > 0) frame.append(...overlay(boxes, size ?? own));
  };
  image.addEventListener("load", loaded, { once: true });
  image.addEventListener("error", () => frame.replaceWith(h("div", { class: "picture-missing" }, "image cannot be shown")), { once: true });
  return figure;
}

/** The last part of a path; a data URL says only that it is one. */
export function shortSource(source) {
  if (!source) return "";
  return source.startsWith("data:") ? "inline image" : source.split("/").at(-1);
}

function toneOf(image, faint) {
  return [faint && "faint", image.claimed && "claimed"].filter(Boolean).join(" ");
}

/** The boxes on a source: crops as far as `crops` has them, and the targets if tools read it. */
function boxesOn(url, crops, marks, current = null) {
  const drawn = crops.map(({ number, image }) => ({ number, box: image.box, tone: toneOf(image, current !== null && image !== current) }));
  const targets = marks.sources.has(url) ? marks.targets : [];
  return [...drawn, ...targets.map((box) => ({ number: null, box, tone: "target" }))];
}

/** The images of a message or of the sample, with the boxes of later crops on those that were cropped. */
export function messageImages(images, marks = NO_MARKS) {
  if (!images || images.length === 0) return null;
  return h(
    "div",
    { class: "pictures" },
    images.map((image) => {
      const crops = marks.crops.filter((crop) => image.url && crop.image.source_url === image.url);
      const note = crops.length > 0 ? ` · ${crops.length} ${crops.length === 1 ? "crop" : "crops"} taken from it` : "";
      const size = crops.find((crop) => crop.image.source_size)?.image.source_size ?? null;
      return picture(image.url, [visible(shortSource(image.source ?? image.name)), note], boxesOn(image.url, crops, marks), size);
    }),
  );
}

function argumentText(value) {
  if (Array.isArray(value) && value.every((one) => typeof one === "number")) return `[${edges(value)}]`;
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** "crop [32, 160, 96, 224] → rotate −90 → resize [64, 64]". */
function stepsText(steps) {
  const one = (step) => {
    if (step === null || typeof step !== "object") return String(step);
    return [step.name ?? "?", ...Object.values(step.arguments ?? {}).map(argumentText)].join(" ");
  };
  const text = (steps ?? []).map(one).join(" → ");
  return text.length > 4 * LONG ? `${text.slice(0, 4 * LONG)}…` : text;
}

function provenance(image) {
  if (!image.provenance) return null;
  const [word, tone, title] = Object.hasOwn(WAYS, image.provenance) ? WAYS[image.provenance] : [image.provenance, "warn", null];
  return [" ", badge(word, tone, title)];
}

function caption(image, crop) {
  const made = stepsText(image.steps);
  return [
    crop && h("span", { class: "box-number" }, String(crop.number)),
    visible(image.name ?? ""),
    Array.isArray(image.size) ? ` ${image.size[0]} × ${image.size[1]}` : "",
    provenance(image),
    made && h("div", { class: "picture-steps", title: "how it was made of its source" }, image.claimed && "said to be: ", visible(made)),
  ];
}

/** Where a crop lies in its source, with those before it. */
function sourceOf(crop, marks) {
  const { image } = crop;
  const upTo = marks.crops.filter((other) => other.image.source_url === image.source_url && other.number <= crop.number);
  const outside = image.source_size && onImage(image.box, image.source_size) === null;
  const words = [image.claimed ? "said to be: " : "where: ", h("code", null, `[${edges(image.box)}]`), outside && " outside the image"];
  return picture(image.source_url, words, boxesOn(image.source_url, upTo, marks, image), image.source_size, "what the tool read");
}

/** The images of a call: what came back, for a crop where it lies in its source, and what the model was shown if that is another. */
export function callImages(call, marks) {
  if (!call.images || call.images.length === 0) return null;
  return call.images.map((image) => {
    const crop = marks.crops.find((one) => one.image === image);
    const targets = marks.targets.map((box) => throughMatrix(box, image.matrix)).filter(Boolean).map((box) => ({ number: null, box, tone: "target" }));
    const result = picture(image.url, caption(image, crop), targets, image.size, visibleText(`image of ${call.name}`.slice(0, LONG)));
    const other = image.shown_url && picture(image.shown_url, [badge("shown instead", "warn", "what the model was given in its place")], [], null, "what the model was shown instead");
    return h("div", { class: "pictures" }, crop && image.source_url && sourceOf(crop, marks), result, other && h("div", { class: "instead" }, other));
  });
}

/** A button that shows or hides the boxes of the ground truth; the address keeps it. Null where a sample has none. */
export function targetToggle(targets, shown, onChange) {
  if (!targets?.length) return null;
  const button = h(
    "button",
    {
      type: "button",
      class: "target-toggle",
      "aria-pressed": String(shown),
      title: "where the ground truth says the evidence lies",
      onClick: () => {
        const next = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(next));
        onChange(next);
      },
    },
    h("span", { class: "target-swatch", "aria-hidden": "true" }),
    targets.length === 1 ? "Target box" : `${targets.length} target boxes`,
  );
  return button;
}
