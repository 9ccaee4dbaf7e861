// The tokens of a trajectory as spans, built in slices so that twenty thousand of them never block the page.
import { h } from "board/dom.js";
import { number } from "board/format.js";
import { NOTHING, POLICY } from "board/parts/channels.js";
import { promptFold } from "board/parts/prompt_fold.js";
import { visibleText } from "board/parts/visible.js";

// A block ends at a line end after this many tokens, so that what is out of sight need not be laid out.
const BLOCK = 150;
const BLOCK_AT_MOST = 600;
const SLICE_MS = 10;
// A prompt of more tokens is folded.
const LONG_PROMPT = 40;

/** What a token looks like in the flow: white space stays, a line end is drawn, nothing is empty. */
function drawn(piece) {
  if (piece === "") return "◦";
  return visibleText(piece).replace(/\n/g, "↵\n").replace(/\t/g, "→\t");
}

function later() {
  return new Promise((resume) => {
    setTimeout(resume, 0);
  });
}

/** Where blocks begin: where the policy begins or ends to write, and at line ends of long stretches. */
function blocksOf(segment) {
  const { pieces, origins } = segment;
  const starts = [];
  let from = 0;
  for (let index = 0; index < pieces.length; index += 1) {
    const turned = index === 0 || (origins[index] === POLICY) !== (origins[index - 1] === POLICY);
    const full = index - from >= BLOCK_AT_MOST || (index - from >= BLOCK && pieces[index - 1].endsWith("\n"));
    if (!turned && !full) continue;
    from = index;
    starts.push({ index, turned });
  }
  return starts;
}

/** "prompt", "turn 2" or, for what came back in between, "reply". */
function labelOf(segment, index) {
  if (segment.origins[index] === POLICY) return `turn ${segment.turns[index]}`;
  return index === 0 ? "prompt" : "reply";
}

/** Holds the spans of all tokens: `spans[segment][index]`, and paints them. */
export class TokenText {
  constructor(data) {
    this.data = data;
    this.spans = data.segments.map((segment) => Array.from(segment.ids, () => null));
    this.channel = null;
    this.bins = data.segments.map(() => null);
    // Of an image the first token stands for all, which read alike: [segment] -> Map of index -> {start, end, url}.
    this.images = data.segments.map((segment) => new Map((segment.images ?? []).flatMap((image) => Array.from({ length: image.end - image.start }, (_, nth) => [image.start + nth, image]))));
    this.blocks = []; // {at, from, to, node}, in order
    this.painting = 0; // which paint is the latest
    this.node = h("div", { class: "token-text" });
    this.stopped = false;
  }

  /** Builds everything, a slice per frame; tells `progress(done, all)`. */
  async build(progress) {
    const all = this.data.segments.reduce((sum, segment) => sum + segment.ids.length, 0);
    let done = 0;
    let began = performance.now();
    for (const [at, segment] of this.data.segments.entries()) {
      const place = this.#segmentNode(at, segment);
      const fold = this.#promptFold(segment);
      const starts = blocksOf(segment);
      for (const [nth, start] of starts.entries()) {
        const end = starts[nth + 1]?.index ?? segment.ids.length;
        const [block, label] = this.#block(at, segment, start, end);
        if (label) place.append(label);
        if (fold && start.index < fold.end) fold.node.append(block);
        else place.append(block);
        if (fold && label && start.index < fold.end) place.append(fold.node);
        done += end - start.index;
        if (performance.now() - began > SLICE_MS) {
          progress(done, all);
          await later();
          if (this.stopped) return;
          began = performance.now();
        }
      }
    }
    progress(all, all);
  }

  stop() {
    this.stopped = true;
  }

  #segmentNode(at, segment) {
    const place = h("div", { class: "sequence", role: "group", "aria-label": `sequence ${at + 1}: ${segment.ids.length} tokens` });
    const branch = this.data.branches[at];
    if (this.data.segments.length > 1)
      place.append(h("h2", null, visibleText(`Sequence ${at + 1}${branch ? `, ${branch}` : ""}`), h("span", { class: "muted" }, ` ${number(segment.ids.length)} tokens`)));
    this.node.append(place);
    return place;
  }

  #block(at, segment, start, end) {
    const block = h("div", { class: "block" });
    let lines = 1;
    let width = 0;
    for (let index = start.index; index < end; index += 1) {
      if (this.isInside(at, index)) {
        this.spans[at][index] = this.spans[at][this.images[at].get(index).start];
        continue;
      }
      const text = drawn(segment.pieces[index]);
      const span = document.createElement("span");
      span.className = this.#classOf(at, index);
      span.tabIndex = -1;
      span.dataset.at = `${at}:${index}`;
      // A line end outside the span: a frame around it would reach into the next line.
      const ended = text.endsWith("\n");
      span.textContent = ended ? text.slice(0, -1) : text;
      this.spans[at][index] = span;
      block.append(span);
      if (ended) block.append("\n");
      width += text.length;
      if (text.endsWith("\n") || width > 100) {
        lines += 1;
        width = 0;
      }
    }
    // Only an estimate for what was never seen; the browser remembers the real height afterwards.
    block.style.setProperty("--estimate", `${lines * 1.75}em`);
    this.blocks.push({ at, from: start.index, to: end, node: block });
    if (segment.origins[start.index] === POLICY) block.classList.add("written");
    return [block, start.turned ? h("div", { class: "block-label" }, labelOf(segment, start.index)) : null];
  }

  /** Where a long prompt is put, and where it ends; null for a short one. */
  #promptFold(segment) {
    const first = segment.origins.indexOf(POLICY);
    const end = first < 0 ? segment.ids.length : first;
    if (end <= LONG_PROMPT) return null;
    return { end, node: promptFold({ class: "prompt-fold" }, { summary: `${number(end)} tokens` }) };
  }

  /** The first token that is not folded away. */
  firstShown() {
    const block = this.blocks.find(({ node }) => !node.closest("details:not([open])"));
    return block && this.spans[block.at][block.from];
  }

  /** Whether a token belongs to an image and is not its first. */
  isInside(at, index) {
    const image = this.images[at].get(index);
    return image !== undefined && image.start < index;
  }

  #classOf(at, index) {
    const kind = this.images[at].has(index) ? "token image-chip" : "token";
    if (this.channel === null) return kind;
    const bin = this.bins[at][index];
    return bin === NOTHING ? `${kind} nothing` : `${kind} ${this.channel.classes[bin]}`;
  }

  /** Colours every token by a channel: what is in sight at once, the rest in slices. Returns how many fell in each bin. */
  paint(channel) {
    this.channel = channel;
    this.bins = this.data.segments.map((segment) => channel.bins(segment));
    const counts = channel.classes.map(() => 0);
    for (const bins of this.bins) for (const bin of bins) if (bin !== NOTHING) counts[bin] += 1;
    const waiting = [];
    for (const block of this.blocks) {
      const { top, bottom } = block.node.getBoundingClientRect();
      if (bottom > -innerHeight && top < 2 * innerHeight) this.#colour(block);
      else waiting.push(block);
    }
    this.#colourLater(waiting);
    return counts;
  }

  #colour({ at, from, to }) {
    for (let index = from; index < to; index += 1) if (!this.isInside(at, index)) this.spans[at][index].className = this.#classOf(at, index);
  }

  async #colourLater(blocks) {
    this.painting += 1;
    const mine = this.painting;
    let began = performance.now();
    for (const block of blocks) {
      if (performance.now() - began > SLICE_MS) {
        await later();
        if (this.stopped || mine !== this.painting) return;
        began = performance.now();
      }
      this.#colour(block);
    }
  }

  /** The next token after `from` ([segment, index] or null) that lies in a bin, going round; null if there is none. */
  nextIn(bin, from) {
    const places = this.bins.flatMap((bins, at) =>
      Array.from(bins.keys(), (index) => [at, index]).filter(([, index]) => bins[index] === bin && !this.isInside(at, index)),
    );
    if (places.length === 0) return null;
    return places.find(([at, index]) => from === null || at > from[0] || (at === from[0] && index > from[1])) ?? places[0];
  }
}
