// Searches the titles and the texts of conversations. It draws nothing.

const BEFORE_CHARS = 30;
const EXCERPT_CHARS = 120;

/** Return the words of a query as patterns that ignore upper and lower case. */
export function patternsOf(query) {
  const words = query.split(/\s+/).filter(Boolean);
  return words.map((word) => new RegExp(word.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&"), "iu"));
}

/**
 * Return the conversations in whose title and shown messages all patterns occur, in their order:
 * [{ conversation, message, excerpt }]. `message` is the first one with one of the patterns, and
 * `excerpt` the text around it; null if only the title has them, or if both are the same.
 */
export function search(conversations, patterns) {
  const found = [];
  for (const conversation of conversations) {
    const { title, messages } = conversation;
    const occurs = (pattern) =>
      pattern.test(title) || messages.some(({ content }) => pattern.test(content));
    if (!patterns.every(occurs)) continue;
    const message = messages.find(({ content }) => patterns.some((each) => each.test(content)));
    const excerpt = message ? excerptOf(message.content, patterns) : null;
    // The title is often the whole first message, which need not be shown twice.
    found.push({
      conversation,
      message: message ?? null,
      excerpt: excerpt === title ? null : excerpt,
    });
  }
  return found;
}

/** Return the part of a text around the first place of one of the patterns, on one line. */
function excerptOf(text, patterns) {
  const places = patterns.map((pattern) => text.search(pattern)).filter((place) => place >= 0);
  const place = Math.min(...places);
  const start = place > BEFORE_CHARS ? text.indexOf(" ", place - BEFORE_CHARS) + 1 : 0;
  const from = start > 0 && start <= place ? start : Math.max(0, place - BEFORE_CHARS);
  const part = text.slice(from, from + EXCERPT_CHARS).replace(/\s+/g, " ");
  return `${from ? "…" : ""}${part}${from + EXCERPT_CHARS < text.length ? "…" : ""}`;
}

/** Return the parts of a text: [{ text, isMatch }]. */
export function markedParts(text, patterns) {
  if (!patterns.length) return [{ text, isMatch: false }];
  const any = new RegExp(patterns.map(({ source }) => `(?:${source})`).join("|"), "giu");
  const parts = [];
  let at = 0;
  for (const match of text.matchAll(any)) {
    parts.push({ text: text.slice(at, match.index), isMatch: false });
    parts.push({ text: match[0], isMatch: true });
    at = match.index + match[0].length;
  }
  return [...parts, { text: text.slice(at), isMatch: false }].filter((part) => part.text);
}
