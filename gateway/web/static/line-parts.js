// Text that grows, in elements of some lines each. The browser lays out the last one again when text is
// added, and not all of the text.

import { fill, h } from "./dom.js";

/** A part ends with the first line that gives it this many letters. */
const PART_CHARS = 4000;

export class LineParts {
  constructor(element) {
    this.element = element;
    this.clear();
  }

  clear() {
    fill(this.element);
    this.last = null; // the part that takes more text; null: the next text begins one
    this.numOpen = 0; // letters that it lacks
  }

  append(text) {
    for (let at = 0; at < text.length;) {
      if (!this.last) this.open();
      const lineEnd = text.indexOf("\n", at + Math.max(this.numOpen - 1, 0)) + 1;
      const end = lineEnd || text.length;
      this.last.append(text.slice(at, end));
      this.numOpen -= end - at;
      if (lineEnd) this.last = null;
      at = end;
    }
  }

  /** Add a part of its own for the nodes that show `text`: a node can have several lines. */
  appendNodes(nodes, text) {
    this.open(nodes);
    this.numOpen -= text.length;
    if (this.numOpen <= 0 && text.endsWith("\n")) this.last = null;
  }

  open(nodes = []) {
    this.last = h("span", { class: "lines" }, nodes);
    this.numOpen = PART_CHARS;
    this.element.append(this.last);
  }
}
