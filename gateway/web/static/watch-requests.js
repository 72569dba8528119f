// The table of the open requests, oldest first. A row is updated in place, so that a click or the focus
// is not lost when the next frame arrives.

import { fill, h } from "./dom.js";
import { count, duration, rate, STAGES, WAITS } from "./watch-words.js";

const COLUMNS = ["Request", "Account", "Stage", "Waits for", "Age", "Prompt", "Answer", "Tokens/s"];

export class RequestTable {
  /** `choose` is called with the name of the request whose row was clicked. */
  constructor(choose) {
    this.choose = choose;
    this.selected = "";
    this.rows = new Map(); // name -> { root, button, cells }
    this.body = h("tbody", {});
    this.note = h("p", { class: "muted" }); // until the first frame, nothing is known
    const head = h("tr", {}, COLUMNS.map((name) => h("th", { scope: "col" }, name)));
    const table = h("table", { class: "plain watch-table" }, h("thead", {}, head), this.body);
    this.root = h("div", {}, h("div", { class: "watch-scroll" }, table), this.note);
  }

  draw(engines) {
    const shown = engines.flatMap((engine) => engine.requests);
    const open = engines.reduce((sum, engine) => sum + engine.num_open, 0);
    const names = new Set(shown.map((request) => request.name));
    for (const [name, row] of this.rows) {
      if (names.has(name)) continue;
      row.root.remove();
      this.rows.delete(name);
    }
    for (const request of shown) this.row(request.name).update(request);
    this.note.textContent = open > shown.length ? `and ${count(open - shown.length)} more` : open ? "" : "No open request.";
  }

  /** Show no requests, and do not say that there are none. */
  forget() {
    this.draw([]);
    this.note.textContent = "";
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
