// Renders the markdown that models write: headings, lists, tables, quotes, code, formulas and text.
//
// The text comes from a model, so it is hostile. It only ever becomes text nodes and the elements
// that this file and those it imports create. HTML in it is shown as text. Links lead to http, https
// and mailto addresses only, and pictures are shown as links, because loading one would send data to
// another host.
//
// The time is proportional to the length of the text: searches that fail are not repeated, and
// nesting deeper than MAX_DEPTH is shown as it is. While a text grows, only its end is read and
// rendered again.

import { CodeBlock } from "./code-block.js";
import { h } from "./dom.js";
import { formulaElement } from "./formula-view.js";
import { displayEnd } from "./formulas.js";
import { inline, MAX_DEPTH } from "./inline.js";

/** The last blocks of a text may still change: a line that follows can belong to the last one, or turn
 * it into lines of the one before it. */
const NUM_OPEN = 2;
/** Blocks are in groups of this size. The browser lays out and paints only groups near the window. */
const GROUP_BLOCKS = 24;

/** An element whose content is markdown that grows. */
export class MarkdownView {
  constructor() {
    this.element = h("div", { class: "markdown" });
    this.groups = []; // Parts of GROUP_BLOCKS blocks each
    this.last = null; // the element of the last block
    this.settled = ""; // the text of the blocks that will not change
    this.numSettled = 0;
    this.numChars = 0;
  }

  /** Show `text` instead of the text shown so far. */
  update(text) {
    const whole = text.replace(/\r\n?/g, "\n");
    if (whole.length < this.numChars || !whole.startsWith(this.settled)) {
      this.settled = "";
      this.numSettled = 0;
    }
    this.numChars = whole.length;
    const lines = whole.slice(this.settled.length).split("\n");
    const blocks = splitBlocks(lines);
    this.show(blocks);
    const numNew = blocks.length - NUM_OPEN;
    if (numNew <= 0) return;
    const before = lines.slice(0, blocks[numNew].at);
    const length = before.reduce((sum, line) => sum + line.length + 1, 0);
    this.settled = whole.slice(0, this.settled.length + length);
    this.numSettled += numNew;
  }

  /** Show the blocks that follow the settled ones. */
  show(blocks) {
    const numBlocks = this.numSettled + blocks.length;
    const numGroups = Math.ceil(numBlocks / GROUP_BLOCKS);
    for (const { element } of this.groups.splice(numGroups)) element.remove();
    for (let first = this.numSettled; first < numBlocks;) {
      const place = Math.floor(first / GROUP_BLOCKS);
      const end = Math.min((place + 1) * GROUP_BLOCKS, numBlocks);
      const group = (this.groups[place] ??= this.addGroup());
      const own = blocks.slice(first - this.numSettled, end - this.numSettled);
      group.update(own, (block) => renderBlock(block, 0), first % GROUP_BLOCKS);
      first = end;
    }
    this.markLast();
  }

  /** Mark the last block for the style sheet. The browser would style all elements of a block, or of a
   * group, again when `:last-child` no longer applies to it. */
  markLast() {
    const last = this.groups.at(-1)?.shown.at(-1)?.node ?? null;
    if (last === this.last) return;
    this.last?.removeAttribute("data-last");
    last?.setAttribute("data-last", "");
    this.last = last;
  }

  addGroup() {
    const element = h("div", { class: "group" });
    this.element.append(element);
    return new Parts(element);
  }
}

/**
 * The children of an element, made of { type, lines } in the same order. Those that have not changed are
 * kept, and those that can grow do so.
 */
class Parts {
  constructor(element) {
    this.element = element;
    this.shown = []; // { type, key, node, grow }
  }

  /** Show `items` from the place `first` on. `render(item)` returns a node or { node, grow }: grow(lines)
   * changes the node to show these lines instead, and returns false if it cannot. */
  update(items, render, first = 0) {
    items.forEach(({ type, lines }, index) => {
      const place = first + index;
      const key = lines.join("\n");
      const old = this.shown[place];
      if (old?.type === type) {
        if (old.key === key) return;
        if (old.grow?.(lines)) {
          old.key = key;
          return;
        }
      }
      const made = render({ type, lines });
      const { node, grow } = made instanceof Node ? { node: made } : made;
      if (old) old.node.replaceWith(node);
      else this.element.append(node);
      this.shown[place] = { type, key, node, grow };
    });
    for (const { node } of this.shown.splice(first + items.length)) node.remove();
  }
}

// ---- blocks

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?: |$)/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const QUOTE = /^ {0,3}>/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)/;
const DELIMITERS = /^[ |:-]+$/;
const MAX_COLUMNS = 64;

const isBlank = (line) => line.trim() === "";
const indentOf = (line) => line.length - line.trimStart().length;

/** Return the blocks of one level: { type, lines, at }, where `at` is the place of the first line. */
function splitBlocks(lines) {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const type = typeAt(lines, at);
    const end = ENDS[type](lines, at);
    blocks.push({ type, lines: lines.slice(at, end), at });
    at = end;
  }
  return blocks;
}

function typeAt(lines, at) {
  const line = lines[at];
  if (FENCE.test(line)) return "code";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (QUOTE.test(line)) return "quote";
  if (ITEM.test(line)) return "list";
  if (isTable(lines, at)) return "table";
  if (displayEnd(lines, at) !== null) return "formula";
  return "paragraph";
}

function isTable(lines, at) {
  const next = lines[at + 1];
  if (
    !lines[at].includes("|") ||
    !next?.includes("|") ||
    !next.includes("-") ||
    !DELIMITERS.test(next)
  )
    return false;
  return cells(next).length <= MAX_COLUMNS;
}

/** Block type -> function that returns the line after the block that starts at `at`. */
const ENDS = {
  code(lines, at) {
    const fence = lines[at].match(FENCE)[1];
    for (let end = at + 1; end < lines.length; end += 1)
      if (closes(lines[end], fence)) return end + 1;
    return lines.length;
  },
  heading: (lines, at) => at + 1,
  formula: displayEnd,
  rule: (lines, at) => at + 1,
  quote(lines, at) {
    let end = at + 1;
    while (
      end < lines.length &&
      !isBlank(lines[end]) &&
      ["quote", "paragraph"].includes(typeAt(lines, end))
    )
      end += 1;
    return end;
  },
  list(lines, at) {
    const first = lines[at].match(ITEM);
    const base = first[1].length;
    const isOrdered = /\d/.test(first[2]);
    let end = at + 1;
    let fence = null;
    for (let next = end; next < lines.length; next += 1) {
      const line = lines[next];
      if (fence) {
        if (closes(line.trimStart(), fence)) fence = null;
      } else if (isBlank(line)) {
        continue;
      } else if (indentOf(line) <= base + 1) {
        const item = line.match(ITEM);
        if (item && !RULE.test(line)) {
          if (/\d/.test(item[2]) !== isOrdered) break;
        } else if (next > end || typeAt(lines, next) !== "paragraph") {
          break; // not indented, and after an empty line
        }
      } else {
        fence = line.trimStart().match(FENCE)?.[1] ?? null;
      }
      end = next + 1;
    }
    return end;
  },
  table(lines, at) {
    let end = at + 2;
    while (end < lines.length && lines[end].includes("|") && !isBlank(lines[end])) end += 1;
    return end;
  },
  paragraph(lines, at) {
    let end = at + 1;
    while (end < lines.length && !isBlank(lines[end]) && !interrupts(lines, end)) end += 1;
    return end;
  },
};

function closes(line, fence) {
  const text = line.trim();
  return text.length >= fence.length && indentOf(line) < 4 && text === fence[0].repeat(text.length);
}

/** Return whether a line ends the paragraph before it. A number does so only if it is 1. */
function interrupts(lines, at) {
  const type = typeAt(lines, at);
  if (type !== "list") return type !== "paragraph";
  return !/\d/.test(lines[at].match(ITEM)[2]) || /^ *1[.)] /.test(lines[at]);
}

function renderBlocks(lines, depth) {
  if (depth > MAX_DEPTH) return [h("p", {}, lines.join("\n"))];
  return splitBlocks(lines).map((block) => {
    const made = renderBlock(block, depth);
    return made instanceof Node ? made : made.node;
  });
}

function renderBlock({ type, lines }, depth) {
  return RENDERERS[type](lines, depth);
}

/** Block type -> function that returns a node, or { node, grow } as `Parts` needs it. */
const RENDERERS = {
  code(lines) {
    const [, fence, info] = lines[0].match(FENCE);
    const indent = indentOf(lines[0]);
    const block = new CodeBlock(info.trim().split(/\s/)[0]);
    const first = lines[0];
    const grow = (now) => {
      if (now[0] !== first) return false;
      const isClosed = now.length > 1 && closes(now.at(-1), fence);
      const inner = now
        .slice(1, isClosed ? -1 : undefined)
        .map((line) => line.slice(Math.min(indent, indentOf(line))));
      block.update(inner.join("\n"), isClosed);
      return true;
    };
    grow(lines);
    return { node: block.element, grow };
  },
  heading(lines) {
    const level = lines[0].match(HEADING)[1].length;
    let text = lines[0].trim().slice(level).trim();
    let end = text.length;
    while (end > 0 && text[end - 1] === "#") end -= 1;
    if (end === 0 || text[end - 1] === " ") text = text.slice(0, end).trim();
    return h(`h${Math.min(level + 2, 6)}`, {}, inline(text)); // the page has h1 and h2 itself
  },
  formula: (lines) => formulaElement("div", lines.join("\n")),
  rule: () => h("hr"),
  quote: (lines, depth) =>
    h(
      "blockquote",
      {},
      renderBlocks(
        lines.map((line) => line.replace(/^ {0,3}> ?/, "")),
        depth + 1,
      ),
    ),
  list(lines, depth) {
    const [, indent, marker] = lines[0].match(ITEM);
    const start = /\d/.test(marker) ? Number.parseInt(marker, 10) : null;
    const list = start === null ? h("ul") : h("ol", { start });
    const items = new Parts(list);
    const first = lines[0].slice(0, indent.length + marker.length);
    const grow = (now) => {
      if (!now[0].startsWith(first)) return false;
      items.update(splitItems(now), (item) => h("li", {}, listItem(item.lines, depth)));
      return true;
    };
    grow(lines);
    return { node: list, grow };
  },
  table(lines) {
    const [names, marks] = lines;
    const aligns = cells(marks).map((cell) => {
      if (cell.endsWith(":")) return cell.startsWith(":") ? "center" : "right";
      return null;
    });
    const row = (line, tag) => {
      const texts = cells(line);
      return h(
        "tr",
        {},
        aligns.map((align, place) => h(tag, { class: align }, inline(texts[place] ?? ""))),
      );
    };
    const body = h("tbody");
    const rows = new Parts(body);
    const grow = (now) => {
      if (now[0] !== names || now[1] !== marks) return false;
      const items = now.slice(2).map((line) => ({ type: "row", lines: [line] }));
      rows.update(items, (item) => row(item.lines[0], "td"));
      return true;
    };
    grow(lines);
    const table = h("table", {}, h("thead", {}, row(names, "th")), body);
    const node = h(
      "div",
      { class: "scrolls", tabindex: 0, role: "region", "aria-label": "Table" },
      table,
    );
    return { node, grow };
  },
  paragraph: (lines) => h("p", {}, inline(lines.map((line) => line.trim()).join("\n"))),
};

/** Return the items of a list: { type, lines }, without their marks. */
function splitItems(lines) {
  const base = lines[0].match(ITEM)[1].length;
  const items = [];
  for (const line of lines) {
    const found = line.match(ITEM);
    if (found && indentOf(line) <= base + 1) {
      const width = Math.min(found[0].length, found[1].length + found[2].length + 4);
      items.push({ type: "item", width, lines: [line.slice(found[0].length)] });
    } else {
      const { width, lines: own } = items.at(-1);
      own.push(line.slice(Math.min(width, indentOf(line))));
    }
  }
  return items;
}

/** Return the children of a list's item. A single paragraph needs no element of its own. */
function listItem(lines, depth) {
  const task = lines[0].match(/^\[([ xX])\] /);
  const own = task ? [lines[0].slice(4), ...lines.slice(1)] : lines;
  const blocks = renderBlocks(own, depth + 1);
  const content =
    blocks[0]?.tagName === "P" && !own.some(isBlank)
      ? [...blocks[0].childNodes, ...blocks.slice(1)]
      : blocks;
  if (!task) return content;
  return [
    h("input", {
      type: "checkbox",
      disabled: true,
      checked: task[1] !== " ",
      "aria-label": "Done",
    }),
    " ",
    ...content,
  ];
}

/** Return the cells of a table's row. A bar after a backslash belongs to its cell. */
function cells(line) {
  const text = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return text.split(/(?<!\\)\|/).map((cell) => cell.replaceAll("\\|", "|").trim());
}
