// Renders the markdown inside a line or a paragraph: emphasis, code, links and formulas.
//
// The text comes from a model, so it is hostile: see markdown.js.

import { h } from "./dom.js";
import { formulaElement } from "./formula-view.js";
import { formulaEnd } from "./formulas.js";

export const MAX_DEPTH = 12;
const SAFE_PROTOCOLS = new Set(["http:", "https:", "mailto:"]);
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;
const SPECIAL = /[\\`*_~[!<\nh$]/;
const LINK = /https?:\/\/[^\s<>"'`]+/y;

/** Return the nodes of a line or paragraph. */
export function inline(text, depth = 0) {
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

/** Return the address if a link may lead there, otherwise null. */
function safeAddress(text) {
  try {
    const address = new URL(text);
    return SAFE_PROTOCOLS.has(address.protocol) ? address.href : null;
  } catch {
    return null;
  }
}
