// A block of code: its language, its colours, and buttons that copy it and wrap its long lines.

import { colour, isColoured, MAX_COLOURED_CHARS } from "./code-colours.js";
import { copyButton, h } from "./dom.js";
import { LineParts } from "./line-parts.js";

const WRAP = "tidegate.wrap";
/** While code grows, it is coloured again when it is longer by this factor, so the work for all of it
 * is proportional to its length. Until then its end has no colours. */
const GROWTH = 1.25;
/** Code that has not grown for this time is coloured to its end. */
const PAUSE_MS = 400;

export class CodeBlock {
  constructor(language = "") {
    this.language = language;
    this.text = "";
    this.numColoured = 0;
    const code = h("code");
    this.parts = new LineParts(code);
    const head = h(
      "figcaption",
      {},
      h("span", {}, language),
      wrapButton(),
      copyButton("Copy", () => this.text),
    );
    this.element = h("figure", { class: "code" }, head, h("pre", { tabindex: 0 }, code));
  }

  /** Show `text` instead of the text shown so far. */
  update(text, isComplete = true) {
    const old = this.text;
    this.text = text;
    if (text.startsWith(old)) this.parts.append(text.slice(old.length));
    else this.replace(text);
    if (!isColoured(this.language)) return;
    clearTimeout(this.pause);
    if (isComplete || text.length >= this.numColoured * GROWTH) this.colour();
    else this.pause = setTimeout(() => this.colour(), PAUSE_MS);
  }

  replace(text) {
    this.numColoured = 0;
    this.parts.clear();
    this.parts.append(text);
  }

  async colour() {
    const text = colouredPart(this.text);
    if (this.numColoured === text.length) return;
    this.numColoured = text.length;
    const coloured = colour(text, this.language);
    const nodes = coloured instanceof Promise ? await coloured : coloured;
    // The code may have grown while the colours were loaded.
    if (!nodes || !this.text.startsWith(text)) return;
    this.parts.clear();
    this.parts.appendNodes(nodes, text);
    this.parts.append(this.text.slice(text.length));
  }
}

function colouredPart(text) {
  if (text.length <= MAX_COLOURED_CHARS) return text;
  return text.slice(0, text.lastIndexOf("\n", MAX_COLOURED_CHARS) + 1);
}

/** Return the element of a block of code that does not change. */
export function codeBlock(text, language) {
  const block = new CodeBlock(language);
  block.update(text);
  return block.element;
}

// ---- long lines

function wrapButton() {
  return h(
    "button",
    {
      type: "button",
      class: "button small ghost wrap",
      "aria-pressed": String("wrap" in document.documentElement.dataset),
      title: "Wrap the long lines of all blocks of code",
      onclick: () => setWrap(!("wrap" in document.documentElement.dataset)),
    },
    "Wrap",
  );
}

function setWrap(isOn) {
  if (isOn) document.documentElement.dataset.wrap = "";
  else delete document.documentElement.dataset.wrap;
  for (const button of document.querySelectorAll("figure.code .wrap"))
    button.setAttribute("aria-pressed", String(isOn));
  try {
    if (isOn) localStorage.setItem(WRAP, "on");
    else localStorage.removeItem(WRAP);
  } catch {
    // Storage is disabled: the choice lasts until the page is closed.
  }
}

try {
  if (localStorage.getItem(WRAP)) document.documentElement.dataset.wrap = "";
} catch {
  // Storage is disabled in this browser.
}
