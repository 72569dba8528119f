// Colours code with highlight.js. Its core and each language are loaded when a block of code needs them.

import { h } from "./dom.js";

/** File of highlight.js -> the names of its language in markdown, besides the file's. */
const LANGUAGES = {
  bash: ["sh", "shell", "zsh", "console", "shell-session"],
  c: ["h"],
  cpp: ["c++", "cc", "hpp", "cuda"],
  csharp: ["c#", "cs"],
  css: [],
  diff: ["patch"],
  dockerfile: ["docker"],
  go: ["golang"],
  ini: ["toml", "cfg", "conf"],
  java: [],
  javascript: ["js", "jsx", "mjs", "node"],
  json: ["json5", "jsonc", "arguments"],
  kotlin: ["kt"],
  lua: [],
  makefile: ["make"],
  markdown: ["md"],
  php: [],
  python: ["py", "python3", "py3"],
  r: [],
  ruby: ["rb"],
  rust: ["rs"],
  scala: [],
  sql: ["postgresql", "sqlite", "mysql"],
  swift: [],
  typescript: ["ts", "tsx"],
  xml: ["html", "svg", "xhtml", "vue"],
  yaml: ["yml"],
};
/** Languages that occur inside others. */
const INNER = { xml: ["css", "javascript"], markdown: ["xml"] };
const FILES = new Map(
  Object.entries(LANGUAGES).flatMap(([file, names]) => [file, ...names].map((name) => [name, file])),
);
/** The lines after this many letters have no colours, because those of a block are made at once. */
export const MAX_COLOURED_CHARS = 20_000;

/** Kind of a part of code in highlight.js -> its class here (chat.css). Other kinds have no colour. */
const KINDS = {
  addition: "string",
  attr: "name",
  attribute: "name",
  built_in: "title",
  bullet: "keyword",
  char: "number",
  class: "title",
  code: "string",
  comment: "comment",
  deletion: "deletion",
  doctag: "keyword",
  keyword: "keyword",
  link: "string",
  literal: "number",
  meta: "comment",
  name: "keyword",
  number: "number",
  property: "name",
  quote: "comment",
  regexp: "string",
  section: "title",
  "selector-attr": "name",
  "selector-class": "title",
  "selector-id": "title",
  "selector-pseudo": "name",
  "selector-tag": "keyword",
  string: "string",
  symbol: "number",
  "template-variable": "name",
  title: "title",
  type: "title",
  variable: "name",
};

let core = null;
const loaded = new Set();
const loading = new Map();

/** Return whether code of a language has colours. */
export function isColoured(language) {
  return FILES.has(language.toLowerCase());
}

/** Return the nodes of coloured code, or null if it cannot be read. A promise of them, if the language
 * must be loaded. */
export function colour(text, language) {
  const file = FILES.get(language.toLowerCase());
  if (loaded.has(file)) return coloured(text, file);
  return load(file).then(
    () => coloured(text, file),
    () => null, // the server cannot be reached
  );
}

function coloured(text, file) {
  const { value } = core.highlight(text, { language: file, ignoreIllegals: true });
  return value instanceof DocumentFragment ? value : null; // after a failure it is HTML
}

function load(file) {
  if (!loading.has(file)) {
    const started = loadFiles(file);
    loading.set(file, started);
    started.catch(() => loading.delete(file));
  }
  return loading.get(file);
}

async function loadFiles(file) {
  const needed = [file, ...(INNER[file] ?? []).filter((inner) => !loaded.has(inner))];
  const [main, ...languages] = await Promise.all([
    import("./vendor/highlight/core.min.js"),
    ...needed.map((name) => import(`./vendor/highlight/languages/${name}.min.js`)),
  ]);
  core ??= main.default;
  core.configure({ __emitter: NodeEmitter });
  languages.forEach((language, place) => core.registerLanguage(needed[place], language.default));
  for (const name of needed) loaded.add(name);
}

/** Receives the parts of code from highlight.js, and makes nodes of them instead of HTML. */
class NodeEmitter {
  constructor() {
    this.root = document.createDocumentFragment();
    this.open = [this.root];
  }

  addText(text) {
    if (text) this.open.at(-1).append(text);
  }

  openNode(scope) {
    const kind = KINDS[scope.split(".")[0]];
    const span = h("span", { class: kind ? `hl-${kind}` : null });
    this.open.at(-1).append(span);
    this.open.push(span);
  }

  closeNode() {
    this.open.pop();
  }

  startScope(scope) {
    this.openNode(scope);
  }

  endScope() {
    this.closeNode();
  }

  __addSublanguage({ root }) {
    this.open.at(-1).append(root);
  }

  finalize() {}

  toHTML() {
    return this.root;
  }
}
