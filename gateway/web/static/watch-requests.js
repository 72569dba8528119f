// The table of the open requests, oldest first. A row is updated in place, so that a click or the focus
// is not lost when the next frame arrives.

import { fill, h } from "./dom.js";
import { count, duration, rate, STAGES, WAITS } from "./watch-words.js";

const COLUMNS = ["Request", "Account", "Stage", "Waits for", "Age", "Prompt", "Answer", "Tokens/s"];
/** Columns that are shown only if a request has a value there: place in COLUMNS, class that hides it. */
const OPTIONAL = [
  [COLUMNS.indexOf("Account"), "no-account"],
  [COLUMNS.indexOf("Waits for"), "no-wait"],
];

export class RequestTable {
  /** `choose` is called with the name of the request whose row was clicked. */
  constructor(choose) {
    this.choose = choose;
    this.selected = "";
    this.rows = new Map(); // name -> { root, button, cells }
    this.body = h("tbody", {});
    this.note = h("p", { class: "muted" }); // until the first frame, nothing is known
    const head = h("tr", {}, COLUMNS.map((name) => h("th", { scope: "col" }, name)));
    this.table = h("table", { class: "plain watch-table" }, h("thead", {}, head), this.body);
    // It scrolls sideways on a narrow screen, also with the keys.
    const scrolled = { class: "watch-scroll", role: "region", "aria-label": "Open requests", tabindex: 0 };
    this.scrolled = h("div", { ...scrolled, hidden: true }, this.table);
    this.root = h("div", {}, this.scrolled, this.note);
  }

  draw(engines) {
    this.root.hidden = false;
    const shown = engines.flatMap((engine) => engine.requests);
    const open = engines.reduce((sum, engine) => sum + engine.num_open, 0);
    const names = new Set(shown.map((request) => request.name));
    for (const [name, row] of this.rows) {
      if (names.has(name)) continue;
      row.root.remove();
      this.rows.delete(name);
    }
    for (const request of shown) this.row(request.name).update(request);
    const rows = [...this.rows.values()];
    for (const [place, name] of OPTIONAL)
      this.table.classList.toggle(name, !rows.some((row) => row.cells[place - 1].textContent));
    this.scrolled.hidden = !shown.length;
    this.note.textContent = noteOf(open - shown.length, open, engines);
  }

  /** Hide the table until there is a frame again, because nothing is known about requests. */
  forget() {
    this.draw([]);
    this.root.hidden = true;
  }

  select(name) {
    this.selected = name;
    for (const [each, row] of this.rows) row.mark(each === name);
  }

  row(name) {
    if (!this.rows.has(name)) {
      const row = new RequestRow(name, () => this.choose(name));
      row.mark(name === this.selected);
      this.rows.set(name, row);
      this.body.append(row.root);
    }
    return this.rows.get(name);
  }
}

/** Return what is said below the table. Nothing is known of an engine that does not answer. */
function noteOf(more, open, engines) {
  if (more > 0) return `and ${count(more)} more`;
  return open || !engines.length || engines.some(({ error }) => error) ? "" : "No open request.";
}

class RequestRow {
  constructor(name, choose) {
    this.button = h("button", { type: "button", class: "watch-name mono", title: "Explain its time" }, name);
    this.cells = COLUMNS.slice(1).map(() => h("td", {}));
    this.root = h("tr", { onclick: choose }, h("th", { scope: "row" }, this.button), this.cells);
  }

  update(request) {
    const { stage = "", prompt_tokens: prompt = 0, cached_tokens: cached = 0, generated_tokens: generated = 0 } = request;
    const speed = request.decode_s > 0 ? rate(generated / request.decode_s) : "";
    const isComputing = stage === "prefill" && prompt > 0;
    const texts = [
      request.account ?? "",
      h("span", { class: `watch-stage ${stage}` }, STAGES[stage] ?? stage),
      WAITS[request.waits_for] ?? "",
      duration(request.age_s ?? 0),
      isComputing ? `${count(request.computed_tokens ?? 0)} of ${count(prompt)}` : cached ? `${count(prompt)} (${count(cached)} cached)` : count(prompt),
      `${count(generated)} of ${count(request.most_tokens ?? 0)}`,
      speed,
    ];
    texts.forEach((text, place) => {
      const cell = this.cells[place];
      if (cell.textContent !== (text.textContent ?? text)) fill(cell, text);
    });
  }

  mark(isSelected) {
    this.root.classList.toggle("selected", isSelected);
    this.button.setAttribute("aria-pressed", String(isSelected));
  }
}
