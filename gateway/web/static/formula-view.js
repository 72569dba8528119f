// Shows formulas with KaTeX, which is loaded when the first one is shown. Until then, and if KaTeX does
// not understand a formula, its source is shown.
//
// Formulas come from a model, so they are hostile. KaTeX only makes the elements of its layout; commands
// that would load something, lead to an address or set attributes are errors (`trust`). The sizes and
// the number of macros in a formula have limits.

import { fill, h, loadStyle } from "./dom.js";
import { formulaParts } from "./formulas.js";

const MAX_CHARS = 5000;
const MAX_KEPT = 500;
/** The time in which formulas of one frame are set at once. Others are set in later frames. */
const FRAME_MS = 8;
const OPTIONS = {
  throwOnError: true,
  strict: "ignore",
  trust: false,
  errorColor: "var(--bad)", // of the name of a command that is not trusted
  maxSize: 20,
  maxExpand: 500,
};
/** These commands would write into the browser's console. */
const MACROS = { "\\message": "", "\\errmessage": "", "\\show": "" };

let katex = null;
let loading = null;
/** Source -> { node } or { problem }: a formula in a paragraph that grows is set only once. */
const kept = new Map();
const waiting = [];
let spentMs = 0;
let isPlanned = false;

/** Return an element that shows a formula. `source` has the marks of its start and end. */
export function formulaElement(tag, source) {
  const element = h(tag, { class: "formula" }, source);
  const parts = source.length <= MAX_CHARS ? formulaParts(source) : null;
  if (parts === null) return element;
  if (parts.isDisplay) element.classList.add("display");
  const entry = { element, source, parts };
  if (kept.has(source) || (katex && spentMs < FRAME_MS)) show(entry);
  else waiting.push(entry);
  plan();
  return element;
}

/** At the next frame, set the formulas that wait. */
function plan() {
  if (isPlanned || (!waiting.length && !spentMs)) return;
  isPlanned = true;
  const ready = katex ? new Promise(requestAnimationFrame) : load();
  ready.then(
    () => {
      isPlanned = false;
      spentMs = 0;
      while (waiting.length && spentMs < FRAME_MS) show(waiting.shift());
      plan();
    },
    () => {
      // The server cannot be reached. The next formula tries again.
      isPlanned = false;
      waiting.length = 0;
    },
  );
}

function load() {
  loading ??= Promise.all([
    import("./vendor/katex/katex.min.js"),
    loadStyle("vendor/katex/katex.min.css"),
  ]).then(
    () => {
      ({ katex } = globalThis); // the file is no module
    },
    (error) => {
      loading = null;
      throw error;
    },
  );
  return loading;
}

function show({ element, source, parts }) {
  const { node, problem } = kept.get(source) ?? set(source, parts);
  if (problem) element.title = problem;
  else fill(element, node.cloneNode(true));
  element.classList.toggle("broken", Boolean(problem));
}

/** Set a formula, and keep the result. */
function set(source, { tex, isDisplay }) {
  const started = performance.now();
  const result = {};
  try {
    // A formula may change the macros that it is given (\\gdef).
    const options = { ...OPTIONS, displayMode: isDisplay, macros: { ...MACROS } };
    const tree = katex.__renderToDomTree(tex, options);
    withoutStyleAttributes(tree);
    result.node = tree.toNode();
  } catch (error) {
    // Lines below the letters mark the place of the mistake.
    result.problem = error.message.replace(/^KaTeX parse error: /, "").replaceAll("\u0332", "");
  }
  kept.set(source, result);
  if (kept.size > MAX_KEPT) kept.delete(kept.keys().next().value);
  spentMs += performance.now() - started;
  return result;
}

/** Let the nodes of a tree of KaTeX set their styles as properties of their elements. The content
 * security policy forbids attributes. */
function withoutStyleAttributes(node) {
  const { style, ...attributes } = node.attributes ?? {};
  if (style !== undefined) {
    const toNode = node.toNode.bind(node);
    node.attributes = attributes;
    node.toNode = () => {
      const element = toNode();
      element.style.cssText += style;
      return element;
    };
  }
  node.children?.forEach(withoutStyleAttributes);
}
