// Images with the parts that tools cut out of them drawn as numbered boxes over the source.
import { h, svg } from "board/dom.js";
import { visible } from "board/parts/visible.js";

/** Every crop of a trajectory in order: [{number, turn, call, image}], numbered from 1. */
export function cropsOf(turns) {
  const crops = [];
  for (const turn of turns) {
    for (const call of turn.calls) {
      for (const image of call.images ?? []) {
        if (image.box) crops.push({ number: crops.length + 1, turn: turn.index, call: call.id, image });
      }
    }
  }
  return crops;
}

function overlay(image, boxes) {
  const width = image.naturalWidth;
  const height = image.naturalHeight;
  const frame = svg("svg", { class: "boxes", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  const labels = [];
  for (const { number, box, faint } of boxes) {
    const [left, top, right, bottom] = box;
    const at = { x: left, y: top, width: Math.max(0, right - left), height: Math.max(0, bottom - top) };
    const tone = faint ? " faint" : "";
    frame.append(svg("rect", { ...at, class: `box-halo${tone}` }), svg("rect", { ...at, class: `box-line${tone}` }));
    const place = { left: `${(100 * Math.max(0, left)) / width}%`, top: `${(100 * Math.max(0, top)) / height}%` };
    labels.push(h("span", { class: `box-label${tone}`, style: place }, String(number)));
  }
  return [frame, ...labels];
}

/** One image, its boxes (in its own pixels: [{number, box, faint}]) and a caption; a click shows it in full size. */
export function picture(url, caption, boxes = []) {
  if (!url) {
    return h(
      "figure",
      { class: "picture missing" },
      h("div", { class: "picture-missing" }, "image not kept in the run"),
      h("figcaption", null, caption),
    );
  }
  const where = boxes.map(({ number, box }) => `${number}: ${box.map((edge) => Math.round(edge)).join(", ")}`).join("; ");
  const image = h("img", { src: url, alt: where ? `image with boxes ${where}` : "image of the conversation", decoding: "async" });
  const frame = h(
    "button",
    { class: "picture-frame", type: "button", title: "show larger or smaller", onClick: () => figure.classList.toggle("large") },
    image,
  );
  const figure = h("figure", { class: "picture" }, frame, h("figcaption", null, caption));
  const draw = () => frame.append(...overlay(image, boxes));
  if (boxes.length > 0) {
    if (image.complete && image.naturalWidth > 0) draw();
    else image.addEventListener("load", draw, { once: true });
  }
  image.addEventListener(
    "error",
    () => {
      frame.replaceWith(h("div", { class: "picture-missing" }, "image cannot be shown"));
    },
    { once: true },
  );
  return figure;
}

/** The last part of a path; a data URL says only that it is one. */
export function shortSource(source) {
  if (!source) return "";
  return source.startsWith("data:") ? "inline image" : source.split("/").at(-1);
}

/** The images of a message, with the boxes of later crops on those that were cropped. */
export function messageImages(images, crops = []) {
  if (!images || images.length === 0) return null;
  return h(
    "div",
    { class: "pictures" },
    images.map((image) => {
      const boxes = crops
        .filter((crop) => image.url && crop.image.source_url === image.url)
        .map((crop) => ({ number: crop.number, box: crop.image.box }));
      const note = boxes.length > 0 ? ` · ${boxes.length} ${boxes.length === 1 ? "crop" : "crops"} taken from it` : "";
      return picture(image.url, [visible(shortSource(image.source)), note], boxes);
    }),
  );
}

function stepsText(steps) {
  return (steps ?? []).map((step) => (typeof step === "string" ? step : (step.name ?? JSON.stringify(step)))).join(" → ");
}

/** The images of a call: what came back and, for a crop, where it lies in its source. */
export function callImages(call, crops) {
  if (!call.images || call.images.length === 0) return null;
  const mine = new Map(crops.filter((crop) => crop.call === call.id).map((crop) => [crop.image, crop]));
  return h(
    "div",
    { class: "pictures" },
    call.images.map((image) => {
      const crop = mine.get(image);
      const size = Array.isArray(image.size) ? ` ${image.size[0]} × ${image.size[1]}` : "";
      const made = stepsText(image.steps);
      const result = picture(image.url, [
        crop && h("span", { class: "box-number" }, String(crop.number)),
        visible(image.name ?? ""),
        size,
        made && ` · ${made}`,
      ]);
      if (!crop || !image.source_url) return result;
      const before = crops.filter((other) => other.image.source_url === image.source_url && other.number < crop.number);
      const boxes = [
        ...before.map((other) => ({ number: other.number, box: other.image.box, faint: true })),
        { number: crop.number, box: image.box },
      ];
      const at = image.box.map((edge) => Math.round(edge)).join(", ");
      return [picture(image.source_url, ["where: ", h("code", null, `[${at}]`)], boxes), result];
    }),
  );
}
