// Finds the formulas in markdown: $...$, $$...$$, \(...\) and \[...\]. The backslashes and underscores
// in them are not markdown.

/** The start of a formula that has lines of its own -> its end. */
const DISPLAYS = { $$: "$$", "\\[": "\\]" };
const MAX_DISPLAY_LINES = 64;
const DISPLAY = /^ {0,3}(\$\$|\\\[)/;

/** Return the line after the formula that begins at a line, or null. It has no empty line in it, and at
 * most MAX_DISPLAY_LINES. A formula whose end has not arrived yet goes on to the last line. */
export function displayEnd(lines, at) {
  const start = lines[at].match(DISPLAY);
  if (!start) return null;
  const end = DISPLAYS[start[1]];
  const last = Math.min(lines.length, at + MAX_DISPLAY_LINES);
  for (let next = at; next < last; next += 1) {
    if (!lines[next].trim() && next < lines.length - 1) return null;
    const text = next === at ? lines[at].slice(start[0].length) : lines[next];
    if (text.includes(end)) return text.trimEnd().endsWith(end) ? next + 1 : null;
  }
  return last === lines.length ? last : null;
}

/** The start of a formula in a line -> its end. The longest start comes first. */
const FORMULAS = [
  ["$$", /\$\$/g],
  // As in pandoc: a space or a digit tells that a dollar is an amount of money.
  ["$", /(?<![\s\\])\$(?![\d$])/g],
  ["\\(", /\\\)/g],
  ["\\[", /\\\]/g],
];

/** Return the end of the formula that begins at `at`, or null. */
export function formulaEnd(text, at, failed) {
  const [start, close] = FORMULAS.find(([each]) => text.startsWith(each, at)) ?? [];
  if (!start || failed.has(start)) return null;
  if (start === "$" && /^\s?$/.test(text[at + 1] ?? "")) return null;
  close.lastIndex = at + start.length + 1;
  if (close.exec(text)) return close.lastIndex;
  failed.add(start);
  return null;
}

const WHOLE = /^\s*(?:\$\$([^]+)\$\$|\\\[([^]+)\\\]|\\\(([^]+)\\\)|\$([^]+)\$)\s*$/;

/** Return { tex, isDisplay } of a formula as it was written, or null if its end is missing. */
export function formulaParts(source) {
  const found = source.match(WHOLE);
  if (!found) return null;
  const [, dollars, brackets, round, dollar] = found;
  const tex = (dollars ?? brackets ?? round ?? dollar).trim();
  return { tex, isDisplay: (dollars ?? brackets) !== undefined };
}
