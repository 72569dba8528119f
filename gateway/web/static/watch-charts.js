// The pictures of the watch tab: numbers with small curves, slots, blocks and steps.
//
// Each function returns an object with `root`, an element, and `draw`, which updates it. Every picture
// has a text for screen readers that says the same. Colours are those of style.css, which differ in
// lightness too, so that they can be told apart without seeing red and green.

import { fill, h } from "./dom.js";
import { checkpoints, count, duration, percent, rate, stateWords } from "./watch-words.js";

const SVG = "http://www.w3.org/2000/svg";
const MAX_POINTS = 90; // one each second
const MAX_COLUMNS = 160;
const MAX_CELLS = 128;
const [FIRST, COUNT, PREFILL, DECODE, DRAFT, BUSY, LONGEST] = [0, 1, 2, 3, 4, 5, 6]; // of a step

function svg(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

/** The last values of one engine, for curves and columns. */
export class History {
  constructor() {
    this.points = [];
    this.steps = [];
  }

  push(engine) {
    const { rates, first_token: first, gap, past = [] } = engine;
    if (past.length) {
      // The first frame of a stream: it has all there is.
      this.points = past.map((point) => ({ tokens: point.tokens_per_s, first: point.first_token, gap: point.gap }));
      this.steps = [];
    } else {
      this.points.push({ tokens: rates.tokens_per_s, first: first?.p50 ?? null, gap: gap?.p50 ?? null });
    }
    if (this.points.length > MAX_POINTS) this.points.shift();
    const last = this.steps.at(-1);
    if (last && engine.steps.length && engine.steps[0][FIRST] < last[FIRST]) this.steps = []; // it was restarted
    this.steps.push(...engine.steps);
    this.steps.splice(0, Math.max(0, this.steps.length - MAX_COLUMNS));
  }
}

// ---- numbers

const NUMBERS = [
  { name: "Tokens per second", value: (e) => rate(e.rates.tokens_per_s), curve: "tokens", unit: (top) => `${rate(top)}/s` },
  { name: "First token", value: (e) => (e.first_token ? duration(e.first_token.p50) : "–"), more: (e) => spread(e.first_token), curve: "first", unit: duration },
  { name: "Gap between tokens", value: (e) => (e.gap ? duration(e.gap.p50) : "–"), more: (e) => spread(e.gap), curve: "gap", unit: duration },
  { name: "Worker busy", value: (e) => percent(e.rates.busy), more: (e) => `${rate(e.rates.steps_per_s)} steps/s` },
  { name: "Prefix cache hits", value: (e) => percent(e.rates.cache_hits), more: hits },
  { name: "Preempted", value: (e) => count(e.stats.num_preemptions ?? 0), more: (e) => `${count((e.stats.num_refused ?? 0) + (e.stats.num_refused_early ?? 0))} refused` },
];

/** Return what is shown below the share of cached prompt tokens. */
function hits({ rates }) {
  const again = rates.recomputed ?? null;
  const ended = `${rate(rates.requests_per_s)} requests/s`;
  return again === null ? ended : `${ended} · ${percent(again)} computed again`;
}

/** Return the 90th and 99th percentile of a latency as text. */
function spread(found) {
  return found ? `90 % ≤ ${duration(found.p90)} · 99 % ≤ ${duration(found.p99)}` : "";
}

export function numbers() {
  const tiles = NUMBERS.map((number) => {
    const tile = { ...number, shown: h("dd", {}), rest: h("dd", { class: "muted" }), line: number.curve ? sparkline(number.unit) : null };
    tile.root = h("div", { class: "watch-number" }, h("dt", {}, number.name), tile.shown, tile.rest, tile.line?.root ?? null);
    return tile;
  });
  const draw = (engine, history) => {
    for (const tile of tiles) {
      tile.shown.textContent = tile.value(engine);
      tile.rest.textContent = tile.more?.(engine) ?? "";
      tile.line?.draw(history.points.map((point) => point[tile.curve]));
    }
  };
  return { root: h("dl", { class: "watch-numbers" }, tiles.map((tile) => tile.root)), draw };
}

/** A curve of the last seconds, from 0 to its largest value, which `unit` writes. The number beside it says its last value. */
function sparkline(unit) {
  const line = svg("polyline", { fill: "none", "vector-effect": "non-scaling-stroke" });
  const picture = svg("svg", { class: "sparkline", viewBox: `0 0 ${MAX_POINTS} 20`, preserveAspectRatio: "none" }, line);
  const highest = h("span", {});
  const axis = [h("span", {}, `${MAX_POINTS} s ago`), h("span", {}, "now")];
  const root = h("div", { class: "watch-curve", "aria-hidden": "true" }, highest, picture, h("div", { class: "watch-axis" }, axis));
  const draw = (values) => {
    const top = Math.max(...values.map((value) => value ?? 0), 1e-9);
    const start = MAX_POINTS - values.length;
    const points = values.map((value, place) => (value === null ? null : `${start + place},${(19 - (18 * value) / top).toFixed(1)}`));
    line.setAttribute("points", points.filter(Boolean).join(" "));
    highest.textContent = values.some((value) => value > 0) ? unit(top) : "";
  };
  return { root, draw };
}

// ---- slots and queue

const SLOT_STAGES = ["decode", "prefill", "fetching"];

export function slotCells() {
  const cells = h("div", { class: "watch-cells", role: "img" });
  const text = h("p", { class: "muted" });
  const draw = (engine) => {
    const total = engine.limits?.max_slots ?? 0;
    const used = engine.stats.running ?? 0;
    const size = Math.max(1, Math.ceil(total / MAX_CELLS)); // slots per cell
    const stages = engine.requests.map((row) => row.stage).filter((stage) => SLOT_STAGES.includes(stage));
    while (stages.length < used) stages.push("decode"); // rows that the frame has left out
    stages.sort((a, b) => SLOT_STAGES.indexOf(a) - SLOT_STAGES.indexOf(b));
    const wanted = Array.from({ length: Math.ceil(total / size) }, (_, place) => (place * size < used ? stages[place * size] : "free"));
    if (cells.children.length !== wanted.length) fill(cells, wanted.map(() => h("i", {})));
    wanted.forEach((stage, place) => (cells.children[place].className = stage));
    const note = size > 1 ? `, ${size} per cell` : "";
    text.textContent = `${count(used)} of ${count(total)} slots used${note}`;
    const prefills = stages.filter((stage) => stage === "prefill").length;
    cells.setAttribute("aria-label", `${text.textContent}: ${prefills} compute a prompt, ${used - prefills} answer`);
  };
  const root = h("div", {}, cells, text, legend([["decode", "answering"], ["prefill", "computing a prompt"], ["fetching", "fetching K/V"], ["free", "free"]]));
  return { root, draw };
}

export function queueText(engine) {
  const { waiting = 0, waiting_tokens: tokens = 0 } = engine.stats;
  return waiting ? `${count(waiting)} waiting in the queue, with ${count(tokens)} tokens` : "No request is waiting.";
}

function legend(entries) {
  return h("ul", { class: "watch-legend" }, entries.map(([name, text]) => h("li", {}, h("i", { class: name }), text)));
}

// ---- blocks

const OWNERS = [
  ["requests", "of requests"],
  ["leased", "kept for other engines"],
  ["cached", "cached, free when needed"],
  ["free", "free"],
];

export function blocksBar() {
  const bar = ownersBar(OWNERS, "blocks");
  const size = h("p", { class: "muted" });
  const draw = (engine) => {
    const { total_blocks: total = 0 } = engine.stats;
    bar.draw(engine.blocks, total);
    const tokens = engine.limits?.block_tokens;
    size.textContent = tokens ? `${count(total)} blocks of ${count(tokens)} tokens` : `${count(total)} blocks`;
  };
  return { root: h("div", {}, bar.root, size), draw };
}

/** A bar of `things`, divided by their owners: [class, text] of each. */
function ownersBar(owners, things) {
  const bar = h("div", { class: "watch-bar", role: "img" });
  const parts = owners.map(([name]) => h("i", { class: name }));
  bar.append(...parts);
  const numbersOf = owners.map(([name, text]) => ({ number: h("b", {}), root: null, name, text }));
  for (const entry of numbersOf) entry.root = h("li", {}, h("i", { class: entry.name }), entry.number, ` ${entry.text}`);
  const draw = (owned, total) => {
    numbersOf.forEach(({ name, number }, place) => {
      parts[place].style.width = `${(100 * (owned[name] ?? 0)) / (total || 1)}%`;
      number.textContent = count(owned[name] ?? 0);
    });
    bar.setAttribute("aria-label", numbersOf.map(({ number, text }) => `${number.textContent} ${things} ${text}`).join(", "));
  };
  const root = h("div", {}, bar, h("ul", { class: "watch-legend" }, numbersOf.map(({ root: entry }) => entry)));
  return { root, draw };
}

// ---- recurrent states

const HOLDERS = OWNERS.filter(([name]) => name !== "leased");

/** The checkpoints of recurrent states by owner, and the memory of all states. Hidden if the model has none. */
export function statesCard() {
  const bar = ownersBar(HOLDERS, "checkpoints");
  const text = h("p", { class: "muted" });
  const root = h("div", { class: "card wide watch-states" }, h("h3", {}, "Recurrent states and their checkpoints"), bar.root, text);
  const draw = (engine) => {
    root.hidden = !engine.limits?.state_bytes;
    bar.root.hidden = !engine.stats.total_checkpoints;
    bar.draw(checkpoints(engine.stats), engine.stats.total_checkpoints);
    text.textContent = root.hidden ? "" : stateWords(engine);
  };
  return { root, draw };
}

// ---- steps

const KINDS = [
  [PREFILL, "prefill"],
  [DECODE, "decode"],
  [DRAFT, "draft"],
];
const HEIGHT = 80;
const TIME_HEIGHT = 24;

export function stepColumns() {
  const columns = svg("g", {});
  const size = { viewBox: `0 0 ${MAX_COLUMNS} ${HEIGHT + 4 + TIME_HEIGHT}`, preserveAspectRatio: "none" };
  const picture = svg("svg", { class: "watch-steps", role: "img", ...size }, columns);
  const [mostTokens, longestTime] = [h("span", {}), h("span", {})];
  const scale = h("div", { class: "watch-scale", "aria-hidden": "true" }, mostTokens, h("span", {}, "0"), longestTime);
  const axis = h("div", { class: "watch-axis", "aria-hidden": "true" }, h("span", {}, "older"), h("span", {}, "last step"));
  const text = h("p", { class: "muted" });
  const draw = (engine, history) => {
    const { steps } = history;
    const tokens = (step) => (step[PREFILL] + step[DECODE] + step[DRAFT]) / step[COUNT];
    const most = Math.max(1, ...steps.map(tokens));
    const longest = Math.max(1e-9, ...steps.map((step) => step[LONGEST]));
    const start = MAX_COLUMNS - steps.length;
    columns.replaceChildren(...steps.flatMap((step, place) => column(step, start + place, most, longest)));
    const last = steps.at(-1);
    mostTokens.textContent = last ? `${count(most)} tokens` : "";
    longestTime.textContent = last ? duration(longest) : "";
    scale.hidden = axis.hidden = !last;
    text.textContent = last ? "Above: tokens of each step. Below: its time. Equal steps share a column." : "No step yet.";
    const words = last
      ? `The last step computed ${count(last[PREFILL] / last[COUNT])} tokens of prompts, ${count(last[DECODE] / last[COUNT])} of answers and ${count(last[DRAFT] / last[COUNT])} drafts in ${duration(last[BUSY] / last[COUNT])}.`
      : "No step yet.";
    picture.setAttribute("aria-label", words);
  };
  const chart = h("div", { class: "watch-chart" }, scale, picture, axis);
  return { root: h("div", {}, chart, legend(KINDS.map(([, name]) => [name, { prefill: "prompts", decode: "answers", draft: "drafts" }[name]])), text), draw };
}

/** Return the rectangles of one column: its tokens by kind, from below, and its time. */
function column(step, x, most, longest) {
  let bottom = HEIGHT;
  const parts = KINDS.filter(([place]) => step[place]).map(([place, name]) => {
    const height = Math.max(1.5, (HEIGHT * step[place]) / step[COUNT] / most); // what exists is visible
    bottom -= height;
    return svg("rect", { class: name, x, y: Math.max(0, bottom), width: 0.8, height });
  });
  const time = Math.max(0.5, (TIME_HEIGHT * step[LONGEST]) / longest);
  return [...parts, svg("rect", { class: "time", x, y: HEIGHT + 4, width: 0.8, height: time })];
}
