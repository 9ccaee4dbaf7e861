// Moves along the tokens by arrow keys or pointer and shows what is known about the one under the cursor.
import { fill, h } from "board/dom.js";
import { number } from "board/format.js";
import { numbersOf } from "board/parts/channels.js";
import { withSpaces } from "board/parts/visible.js";

function placeOf(span) {
  return span.dataset.at.split(":").map(Number);
}

/** The card of one token. */
function describe(text, [at, index]) {
  const { data } = text;
  const image = text.images[at].get(index);
  const segment = data.segments[at];
  const piece = segment.pieces[index];
  const origin = data.origin_names[segment.origins[index]];
  const rows = [
    [data.ids_are_real ? "id" : "id (made up)", String(segment.ids[index])],
    ["position", `${number(index)}${image ? ` to ${number(image.end - 1)}` : ""} / ${number(segment.ids.length)}${data.segments.length > 1 ? `, sequence ${at + 1}` : ""}`],
    ["turn", String(segment.turns[index])],
    [
      "origin",
      h(
        "span",
        null,
        h("span", { class: `swatch origin-${origin}`, "aria-hidden": "true" }),
        origin,
        origin === "policy" ? " · trained" : " · not trained",
      ),
    ],
    ...numbersOf(segment, index),
  ];
  return [
    image && image.url && h("img", { class: "token-image", src: image.url, alt: "the image that these tokens stand for" }),
    image && !image.url && h("p", { class: "muted" }, "image not kept in the run"),
    h("div", { class: "token-piece" }, piece === "" ? h("i", null, "part of a character, or nothing") : image ? piece : withSpaces(piece)),
    h(
      "dl",
      null,
      rows.map(([name, value]) => [h("dt", null, name), h("dd", null, value)]),
    ),
  ];
}

/** Attaches to a TokenText; `cursor.place` is the current token, `cursor.go(place)` moves there. */
export class TokenCursor {
  constructor(text) {
    this.text = text;
    this.place = null;
    this.card = h("div", { class: "token-card", role: "status", hidden: true });
    const node = text.node;
    node.addEventListener("pointerover", (event) => this.#over(event));
    node.addEventListener("pointerleave", () => {
      if (!node.contains(document.activeElement)) this.hide();
    });
    node.addEventListener("click", (event) => {
      const span = event.target.closest(".token");
      if (span) this.go(placeOf(span));
    });
    node.addEventListener("focusin", (event) => {
      const span = event.target.closest(".token");
      if (span) this.#enter(span);
    });
    node.addEventListener("focusout", (event) => {
      if (!node.contains(event.relatedTarget)) this.hide();
    });
    node.addEventListener("keydown", (event) => this.#press(event));
  }

  /** The first token can be reached with Tab as soon as it is there. */
  ready() {
    const first = this.text.firstShown();
    if (first && this.place === null) first.tabIndex = 0;
  }

  go(place) {
    const span = this.text.spans[place[0]]?.[place[1]];
    if (!span) return;
    const folded = span.closest("details");
    if (folded) folded.open = true;
    span.focus({ preventScroll: true });
    span.scrollIntoView({ block: "nearest" });
    this.#show(span);
  }

  hide() {
    this.card.hidden = true;
  }

  #over(event) {
    const span = event.target.closest(".token");
    if (span && event.pointerType === "mouse") this.#show(span);
  }

  #enter(span) {
    const [at, index] = placeOf(span);
    const last = this.place && this.text.spans[this.place[0]][this.place[1]];
    (last ?? this.text.node.querySelector(".token[tabindex='0']"))?.setAttribute("tabindex", "-1");
    span.tabIndex = 0;
    this.place = [at, index];
    this.#show(span);
  }

  #show(span) {
    fill(this.card, describe(this.text, placeOf(span)));
    this.card.hidden = false;
    const spot = span.getClientRects()[0] ?? span.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this.card;
    const left = Math.min(Math.max(8, spot.left), Math.max(8, innerWidth - width - 8));
    const below = spot.bottom + 6;
    const top = below + height < innerHeight ? below : Math.max(8, spot.top - height - 6);
    this.card.style.left = `${left}px`;
    this.card.style.top = `${top}px`;
  }

  #press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || this.place === null) return;
    if (event.key === "Escape") {
      this.hide();
      return;
    }
    const [at, index] = this.place;
    const end = this.text.spans[at].length - 1;
    const target = {
      ArrowRight: () => this.#beside(1),
      ArrowLeft: () => this.#beside(-1),
      ArrowDown: () => this.#line(1),
      ArrowUp: () => this.#line(-1),
      Home: () => [at, 0],
      End: () => [at, end],
      PageDown: () => [at, Math.min(end, index + 100)],
      PageUp: () => [at, Math.max(0, index - 100)],
    }[event.key];
    if (!target) return;
    event.preventDefault();
    const place = target();
    if (place !== null) this.go(place);
  }

  #beside(step, [at, index] = this.place) {
    const spans = this.text.spans;
    const image = this.text.images[at].get(index + step);
    const next = image === undefined ? index + step : step < 0 ? image.start : image.start === index + step ? index + step : image.end;
    if (next >= 0 && next < spans[at].length) return [at, next];
    const other = at + step;
    if (other < 0 || other >= spans.length || spans[other].length === 0) return null;
    const last = spans[other].length - 1;
    return [other, step > 0 ? 0 : (this.text.images[other].get(last)?.start ?? last)];
  }

  /** The token above or below: the first on another line that comes nearest to this one's left edge. */
  #line(step) {
    const here = this.text.spans[this.place[0]][this.place[1]].getClientRects()[0];
    let best = null;
    let row = null;
    for (let place = this.#beside(step); place !== null; place = this.#beside(step, place)) {
      const box = this.text.spans[place[0]][place[1]]?.getClientRects()[0];
      if (!box) return best;
      if (Math.abs(box.top - here.top) < 4) continue;
      if (row !== null && Math.abs(box.top - row) > 4) return best.place;
      row = box.top;
      const far = Math.abs(box.left - here.left);
      if (best === null || far < best.far) best = { place, far };
    }
    return best === null ? null : best.place;
  }
}
