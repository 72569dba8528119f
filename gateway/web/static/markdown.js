// Renders the markdown that models write: headings, lists, tables, quotes, code, emphasis and
// links.
//
// The text comes from a model, so it is hostile. It only ever becomes text nodes and the elements
// that this file creates. HTML in it is shown as text. Links lead to http, https and mailto
// addresses only, and pictures are shown as links, because loading one would send data to another
// host.
//
// The time is proportional to the length of the text: searches that fail are not repeated, and
// nesting deeper than MAX_DEPTH is shown as it is.

import { copyButton, h } from "./dom.js";
import { formulaElement } from "./formula-view.js";
import { displayEnd, formulaEnd } from "./formulas.js";

const MAX_DEPTH = 12;
const SAFE_PROTOCOLS = new Set(["http:", "https:", "mailto:"]);

/** An element whose content is markdown that grows. Blocks that have not changed are kept. */
export class MarkdownView {
  constructor() {
    this.element = h("div", { class: "markdown" });
    this.keys = [];
  }

  /** Show `text` instead of the text shown so far. */
  update(text) {
    const blocks = splitBlocks(text.replace(/\r\n?/g, "\n").split("\n"));
    blocks.forEach((block, place) => {
      const key = `${block.type}\n${block.lines.join("\n")}`;
      if (this.keys[place] === key) return;
      const node = renderBlock(block, 0);
      if (place < this.element.children.length) this.element.children[place].replaceWith(node);
      else this.element.append(node);
      this.keys[place] = key;
    });
    while (this.element.children.length > blocks.length) this.element.lastElementChild.remove();
    this.keys.length = blocks.length;
  }
}

/** Return the address if a link may lead there, otherwise null. */
export function safeAddress(text) {
  try {
    const address = new URL(text);
    return SAFE_PROTOCOLS.has(address.protocol) ? address.href : null;
  } catch {
    return null;
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

/** Return the blocks of one level: { type, lines, ... }. */
function splitBlocks(lines) {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const type = typeAt(lines, at);
    const end = ENDS[type](lines, at);
    blocks.push({ type, lines: lines.slice(at, end) });
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
  return splitBlocks(lines).map((block) => renderBlock(block, depth));
}

function renderBlock({ type, lines }, depth) {
  return RENDERERS[type](lines, depth);
}

const RENDERERS = {
  code(lines) {
    const [, fence, info] = lines[0].match(FENCE);
    const indent = indentOf(lines[0]);
    const isClosed = lines.length > 1 && closes(lines.at(-1), fence);
    const inner = lines
      .slice(1, isClosed ? -1 : undefined)
      .map((line) => line.slice(Math.min(indent, indentOf(line))));
    return codeBlock(inner.join("\n"), info.trim().split(/\s/)[0]);
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
    const items = [];
    for (const line of lines) {
      const found = line.match(ITEM);
      if (found && indentOf(line) <= indent.length + 1) {
        const width = Math.min(found[0].length, found[1].length + found[2].length + 4);
        items.push({ width, lines: [line.slice(found[0].length)] });
      } else {
        const { width, lines: own } = items.at(-1);
        own.push(line.slice(Math.min(width, indentOf(line))));
      }
    }
    const start = /\d/.test(marker) ? Number.parseInt(marker, 10) : null;
    const children = items.map((item) => h("li", {}, listItem(item.lines, depth)));
    return start === null ? h("ul", {}, children) : h("ol", { start }, children);
  },
  table(lines) {
    const aligns = cells(lines[1]).map((cell) => {
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
    const body = lines.slice(2).map((line) => row(line, "td"));
    const table = h("table", {}, h("thead", {}, row(lines[0], "th")), h("tbody", {}, body));
    return h("div", { class: "scrolls", tabindex: 0, role: "region", "aria-label": "Table" }, table);
  },
  paragraph: (lines) => h("p", {}, inline(lines.map((line) => line.trim()).join("\n"))),
};

/** Return the children of a list's item. A single paragraph needs no element of its own. */
function listItem(lines, depth) {
  const task = lines[0].match(/^\[([ xX])\] /);
  if (task) lines[0] = lines[0].slice(4);
  const blocks = renderBlocks(lines, depth + 1);
  const content =
    blocks[0]?.tagName === "P" && !lines.some(isBlank)
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

/** Return a block of code with its language and a button that copies it. */
export function codeBlock(text, language = "") {
  const head = h(
    "figcaption",
    {},
    h("span", {}, language),
    copyButton("Copy", () => text),
  );
  return h("figure", { class: "code" }, head, h("pre", { tabindex: 0 }, h("code", {}, text)));
}

// ---- inline

const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;
const SPECIAL = /[\\`*_~[!<\nh$]/;
const LINK = /https?:\/\/[^\s<>"'`]+/y;

/** Return the nodes of a line or paragraph. */
function inline(text, depth = 0) {
  if (depth > MAX_DEPTH) return [text];
  const nodes = [];
  const failed = new Set(); // delimiters of which no further end exists
  let plain = "";
  const add = (node) => {
    if (plain) nodes.push(plain);
    plain = "";
    nodes.push(node);
  };
  for (let at = 0; at < text.length;) {
    if (!SPECIAL.test(text[at])) {
      plain += text[at];
      at += 1;
      continue;
    }
    const found = READERS[text[at]](text, at, depth, failed);
    if (found === null) {
      plain += text[at];
      at += 1;
    } else {
      if (typeof found.node === "string") plain += found.node;
      else add(found.node);
      at = found.end;
    }
  }
  if (plain) nodes.push(plain);
  return nodes;
}

/** First character of a construct -> function that returns { node, end }, or null if there is none. */
const READERS = {
  $: formula,
  "\\"(text, at, depth, failed) {
    const found = formula(text, at, depth, failed);
    if (found !== null) return found;
    const next = text[at + 1] ?? "";
    if (next === "\n") return { node: h("br"), end: at + 2 };
    return PUNCTUATION.test(next) ? { node: next, end: at + 2 } : null;
  },
  "\n": (text, at) => ({ node: h("br"), end: at + 1 }),
  "`"(text, at, depth, failed) {
    const end = codeEnd(text, at, failed);
    const run = runLength(text, at);
    if (end === null) return { node: "`".repeat(run), end: at + run };
    let code = text.slice(at + run, end - run).replaceAll("\n", " ");
    if (code.startsWith(" ") && code.endsWith(" ") && code.trim()) code = code.slice(1, -1);
    return { node: h("code", {}, code), end };
  },
  "*": emphasis,
  _: emphasis,
  "~": (text, at, depth, failed) =>
    text[at + 1] === "~" ? emphasis(text, at, depth, failed) : null,
  "["(text, at, depth) {
    // Only the last "[" before "](" begins a link. The others are text.
    const next = text.indexOf("[", at + 1);
    const close = text.slice(at, next < 0 ? undefined : next).indexOf("](") + at;
    if (close < at) return null;
    const end = destinationEnd(text, close + 2);
    if (end === null) return null;
    const address = text
      .slice(close + 2, end)
      .trim()
      .split(/\s/)[0]
      .replace(/^<|>$/g, "");
    return { node: link(address, inline(text.slice(at + 1, close), depth + 1)), end: end + 1 };
  },
  "!": (text, at, depth) => (text[at + 1] === "[" ? READERS["["](text, at + 1, depth) : null),
  "<"(text, at) {
    const tag = text
      .slice(at, at + 2000)
      .match(/^<(br ?\/?|https?:\/\/[^\s<>]*|mailto:[^\s<>]*)>/i);
    if (!tag) return null;
    const node = /^br/i.test(tag[1]) ? h("br") : link(tag[1], [tag[1]]);
    return { node, end: at + tag[0].length };
  },
  h(text, at) {
    LINK.lastIndex = at;
    const found = WORD.test(text[at - 1] ?? " ") ? null : LINK.exec(text);
    if (!found) return null;
    // Punctuation at the end belongs to the sentence.
    const ends = found[0].includes("(") ? ".,;:!?*_~" : ".,;:!?*_~)";
    let end = found[0].length;
    while (ends.includes(found[0][end - 1])) end -= 1;
    const address = found[0].slice(0, end);
    return { node: link(address, [address]), end: at + address.length };
  },
};

function link(address, children) {
  const href = safeAddress(address);
  if (href === null) return h("span", {}, children);
  return h("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, children);
}

/** Return the place of the ")" that ends a link's destination, or null. */
function destinationEnd(text, from) {
  let open = 0;
  for (let at = from; at < Math.min(text.length, from + 1000); at += 1) {
    if (text[at] === "\n") return null;
    if (text[at] === "(") open += 1;
    if (text[at] === ")" && open-- === 0) return at;
  }
  return null;
}

function runLength(text, at) {
  let end = at;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

/** Return the end of the code that begins at `at`, or null. */
function codeEnd(text, at, failed) {
  const run = runLength(text, at);
  const name = `code ${run}`;
  if (failed.has(name)) return null;
  for (let next = text.indexOf("`", at + run); next >= 0;) {
    const length = runLength(text, next);
    if (length === run) return next + length;
    next = text.indexOf("`", next + length);
  }
  failed.add(name);
  return null;
}

function formula(text, at, depth, failed) {
  const end = formulaEnd(text, at, failed);
  return end === null ? null : { node: formulaElement("span", text.slice(at, end)), end };
}

const TAGS = { "*": "em", _: "em", "**": "strong", __: "strong", "~~": "del" };

function emphasis(text, at, depth, failed) {
  const letter = text[at];
  const run = runLength(text, at);
  const literal = { node: letter.repeat(run), end: at + run };
  const opens =
    !/^\s?$/.test(text[at + run] ?? "") && (letter !== "_" || !WORD.test(text[at - 1] ?? " "));
  if (!opens || run > 3) return literal;
  const size = Math.min(run, 2); // of three, the first two are strong
  const delimiter = letter.repeat(size);
  const close = failed.has(delimiter) ? null : closingRun(text, at + size, letter, size, failed);
  if (close === null) {
    failed.add(delimiter);
    return literal;
  }
  const inner = inline(text.slice(at + size, close), depth + 1);
  return { node: h(TAGS[delimiter], {}, inner), end: close + size };
}

/** Return the place of the delimiter that ends an emphasis whose text begins at `from`, or null. */
function closingRun(text, from, letter, size, failed) {
  for (let at = from; at < text.length;) {
    if (text[at] === "\\") at = formulaEnd(text, at, failed) ?? at + 2;
    else if (text[at] === "$") at = formulaEnd(text, at, failed) ?? at + 1;
    else if (text[at] === "`") at = codeEnd(text, at, failed) ?? at + runLength(text, at);
    else if (text[at] !== letter) at += 1;
    else {
      const run = runLength(text, at);
      const isEnd =
        at > from &&
        !/\s/.test(text[at - 1]) &&
        (letter !== "_" || !WORD.test(text[at + run] ?? " "));
      if (isEnd && (run === size || run === 3)) return at + run - size;
      at += run;
    }
  }
  return null;
}
