// Shows the tokens of an answer, shaded by how unlikely they were. The pointer, or the arrow keys,
// show a token's probability and what else was likely.

import { fill, h } from "./dom.js";

const MAX_TOKENS = 4000;
const LEVELS = [0.9, 0.6, 0.3, 0.1]; // least probability of each shade, from none to the darkest

export class TokensView {
  constructor() {
    this.list = h("div", {
      class: "tokens",
      tabindex: 0,
      role: "group",
      "aria-label": "Tokens. Left and right show their probabilities.",
    });
    this.card = h("div", { class: "token-card", role: "status", hidden: true });
    this.element = h("div", { class: "tokens-view" }, this.list, this.card);
    this.entries = [];
    this.current = -1;
    this.list.addEventListener("pointerover", (event) => this.point(event));
    this.list.addEventListener("click", (event) => this.point(event));
    this.element.addEventListener("pointerleave", () => this.hide());
    this.list.addEventListener("blur", () => this.hide());
    this.list.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) {
        event.preventDefault();
        this.show(Math.min(Math.max(this.current + step, 0), this.list.children.length - 1));
      }
    });
  }

  /** Show logprobs as the API sends them: [{ token, logprob, top_logprobs }]. Draw the new ones. */
  update(entries) {
    if (entries.length < this.list.children.length) fill(this.list);
    this.entries = entries;
    for (const entry of entries.slice(this.list.children.length, MAX_TOKENS)) {
      const probability = Math.exp(entry.logprob);
      const level = LEVELS.findIndex((least) => probability >= least);
      this.list.append(
        h("span", { class: `shade-${level < 0 ? LEVELS.length : level}` }, entry.token),
      );
    }
  }

  point(event) {
    if (event.target.parentElement === this.list)
      this.show([...this.list.children].indexOf(event.target));
  }

  show(place) {
    const token = this.list.children[place];
    if (!token) return;
    this.list.children[this.current]?.classList.remove("current");
    token.classList.add("current");
    this.current = place;
    const { token: text, logprob, top_logprobs: top } = this.entries[place];
    const others = top.some((each) => each.token === text)
      ? top
      : [{ token: text, logprob }, ...top];
    fill(
      this.card,
      others.map((each) => this.bar(each, each.token === text)),
    );
    this.card.hidden = false;
    const { offsetLeft, offsetTop, offsetHeight } = token;
    const room = this.element.clientWidth - this.card.offsetWidth;
    this.card.style.left = `${Math.max(0, Math.min(offsetLeft, room))}px`;
    this.card.style.top = `${offsetTop + offsetHeight + 4}px`;
  }

  bar({ token, logprob }, isChosen) {
    const share = Math.exp(logprob);
    const fillBar = h("span", { class: "share" });
    fillBar.style.width = `${Math.max(share * 100, 1)}%`;
    return h(
      "div",
      { class: isChosen ? "chosen" : null },
      h("code", {}, visible(token)),
      h("span", { class: "track" }, fillBar),
      h("span", { class: "number" }, `${(share * 100).toFixed(share < 0.1 ? 2 : 1)} %`),
    );
  }

  hide() {
    this.list.children[this.current]?.classList.remove("current");
    this.card.hidden = true;
  }
}

function visible(token) {
  return token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "(empty)";
}
