// Compares two texts word by word.

/** Most edits that are searched for. The time grows with their number, times the length of the texts. */
export const MAX_EDITS = 500;
// Chinese characters, words, blanks, and any other character.
const PARTS = /\p{Script=Han}|(?:(?!\p{Script=Han})[\p{L}\p{M}\p{N}_])+|\s+|./gsu;
const WORD = /[\p{L}\p{N}]/u;

/** Return the words, blanks and other characters of a text, in order. */
export function partsOf(text) {
  return text.match(PARTS) ?? [];
}

/** Return how many of some parts are words. */
export function countWords(parts) {
  return parts.filter((part) => WORD.test(part)).length;
}

/** Return how many characters of two texts, or items of two lists, are the same from the start. */
export function commonLength(first, second) {
  const most = Math.min(first.length, second.length);
  let at = 0;
  while (at < most && first[at] === second[at]) at += 1;
  return at;
}

/**
 * Return the shortest way from one list to another, as runs [isSame, items of a, items of b] in order.
 *
 * If it has more than `maxEdits` items that only one list has, all items between the common start and
 * the common end are one run that differs. So the cost is bounded for texts that have nothing in common.
 */
export function diff(a, b, maxEdits = MAX_EDITS) {
  const head = commonLength(a, b);
  const most = Math.min(a.length, b.length) - head;
  let tail = 0;
  while (tail < most && a[a.length - 1 - tail] === b[b.length - 1 - tail]) tail += 1;
  const [before, after] = [a, b].map((list) => list.slice(head, list.length - tail));
  const edits = shortestEdits(before, after, maxEdits) ?? [
    ...before.map(() => "a"),
    ...after.map(() => "b"),
  ];
  return runsOf([...Array(head).fill("both"), ...edits, ...Array(tail).fill("both")]);
}

/** Return for each item in which of the lists it is, "a", "b" or "both"; null if there are too many edits. */
function shortestEdits(a, b, maxEdits) {
  const end = a.length - b.length;
  const most = Math.min(a.length + b.length, maxEdits);
  // Myers' greedy algorithm. On diagonal k, which has the places (x, x - k), reach[k + most + 1] is the
  // largest x after `edits` edits. `rounds` keeps all of them, to find the way back.
  const middle = most + 1;
  const reach = new Int32Array(2 * middle + 1);
  const rounds = [];
  const isFromAbove = (known, at, k, edits) =>
    k === -edits || (k !== edits && known[at(k - 1)] < known[at(k + 1)]);
  for (let edits = 0; edits <= most; edits += 1) {
    const at = (k) => k + middle;
    rounds.push(reach.slice(middle - edits, middle + edits + 1)); // from the round before
    for (let k = -edits; k <= edits; k += 2) {
      let x = isFromAbove(reach, at, k, edits) ? reach[at(k + 1)] : reach[at(k - 1)] + 1;
      while (x < a.length && x - k < b.length && a[x] === b[x - k]) x += 1;
      reach[at(k)] = x;
      if (k === end && x === a.length) return wayBack(rounds, a.length, end, isFromAbove);
    }
  }
  return null;
}

function wayBack(rounds, length, end, isFromAbove) {
  const way = [];
  let [x, k] = [length, end];
  for (let edits = rounds.length - 1; edits > 0; edits -= 1) {
    const at = (diagonal) => diagonal + edits;
    const isAdded = isFromAbove(rounds[edits], at, k, edits);
    const from = rounds[edits][at(isAdded ? k + 1 : k - 1)];
    const start = isAdded ? from : from + 1; // of the equal items after the edit
    for (; x > start; x -= 1) way.push("both");
    way.push(isAdded ? "b" : "a");
    x = from;
    k += isAdded ? 1 : -1;
  }
  for (; x > 0; x -= 1) way.push("both");
  return way.reverse();
}

function runsOf(edits) {
  const runs = [];
  for (const edit of edits) {
    const isSame = edit === "both";
    if (runs.at(-1)?.[0] !== isSame) runs.push([isSame, 0, 0]);
    if (edit !== "b") runs.at(-1)[1] += 1;
    if (edit !== "a") runs.at(-1)[2] += 1;
  }
  return runs;
}
