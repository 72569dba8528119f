// The reference: all routes of this server, from its own OpenAPI document.

import { BASE, errorBox, getJson } from "./api.js";
import { fill, h, loadStyle } from "./dom.js";
import { codeBlock } from "./code-block.js";
import { fetchModels } from "./models.js";
import { exampleOf, resolve, schemaView, typeName, withCode } from "./schema.js";
import { tryForm } from "./try-it.js";

/** The groups that come first. */
const TAGS = [
  ...["OpenAI", "Responses", "Anthropic", "Embeddings", "Files and batches"],
  ...["Ollama", "llama.cpp", "Tokens", "Rendering", "Operators"],
];
const EVENTS = "text/event-stream";
const SCOPES = {
  public: "Needs no key.",
  inference: "If the server has keys, it needs one with the scope inference, as applications have.",
  metrics: "If the server has keys, it needs one with the scope metrics, as monitoring has.",
  admin:
    "It needs a key with the scope admin, as operators have. A server without keys allows it to programs on its own machine.",
};

export async function mount(root, context) {
  await Promise.all([loadStyle("chat.css"), loadStyle("docs.css")]);
  fill(root, h("p", { class: "muted page-note" }, "Loading…"));
  try {
    const [spec, models] = await Promise.all([
      getJson("openapi.json"),
      fetchModels().catch(() => []),
    ]);
    const reference = new Reference(root, context, spec, models);
    reference.openPath(context.path);
    return { onPath: (path) => reference.openPath(path), unmount: () => reference.close() };
  } catch (error) {
    fill(root, h("div", { class: "page-note" }, errorBox(error)));
    return { onPath: () => {} };
  }
}

class Reference {
  constructor(root, context, spec, models) {
    Object.assign(this, { root, context, spec });
    this.abort = new AbortController(); // ends requests that were tried
    const operations = Object.entries(spec.paths).flatMap(([path, item]) =>
      Object.entries(item).map(([method, declared]) => ({ path, method, ...declared })),
    );
    const rank = (tag) => (TAGS.includes(tag) ? TAGS.indexOf(tag) : TAGS.length);
    const tags = [...new Set(operations.map(({ tags: [tag] }) => tag))].sort(
      (a, b) => rank(a) - rank(b) || a.localeCompare(b),
    );
    this.hints = hintsFor(models);
    this.entries = operations.map((operation) => this.entry(operation));
    this.groups = tags.map((tag) => ({
      tag,
      entries: this.entries.filter(({ operation }) => operation.tags[0] === tag),
    }));
    this.build();
  }

  build() {
    const { info } = this.spec;
    this.search = h("input", {
      type: "search",
      placeholder: "Search routes and fields",
      "aria-label": "Search routes and fields",
      oninput: () => this.filter(this.search.value),
    });
    this.none = h("p", { class: "muted", hidden: true }, "No route or field matches.");
    const menu = this.groups.map(({ tag, entries }) =>
      h(
        "section",
        {},
        h("h2", {}, tag),
        h(
          "ul",
          {},
          entries.map(({ link }) => link),
        ),
      ),
    );
    const content = this.groups.map(({ tag, entries }) =>
      h(
        "section",
        { class: "group" },
        h("h2", {}, tag),
        entries.map(({ details }) => details),
      ),
    );
    this.sections = [...menu, ...content];
    const base = BASE.href.replace(/\/$/, "");
    fill(
      this.root,
      h("nav", { class: "docs-menu", "aria-label": "Routes" }, this.search, this.none, menu),
      h(
        "div",
        { class: "docs-body" },
        h("h1", {}, `${info.title} ${info.version}`),
        h(
          "p",
          {},
          "All routes of this server, as ",
          h(
            "a",
            { href: new URL("openapi.json", BASE).href, download: "openapi.json" },
            "openapi.json",
          ),
          " describes them. OpenAI's clients use the address ",
          h("code", {}, `${base}/v1`),
          ", Anthropic's ",
          h("code", {}, base),
          ".",
        ),
        h(
          "p",
          {},
          "If the server has keys, send one as ",
          h("code", {}, "Authorization: Bearer KEY"),
          " or ",
          h("code", {}, "x-api-key: KEY"),
          ". Every answer has an ",
          h("code", {}, "x-request-id"),
          ", by which the server's log names the request.",
        ),
        content,
      ),
    );
  }

  /** Return one operation's link and its folded description, which is drawn when it is opened. */
  entry(operation) {
    const { operationId: id, path, method, summary } = operation;
    const badge = () =>
      h("span", { class: `method ${method}` }, method === "delete" ? "DEL" : method.toUpperCase());
    const address = new URL(`reference#${id}`, BASE).href;
    const parts = path.split(/(?=[/_])/).map((part) => [h("wbr"), part]); // a long path breaks here
    const link = h("li", {}, h("a", { href: address }, badge(), h("span", {}, parts)));
    const head = h(
      "summary",
      { id: `head-${id}` },
      badge(),
      h("code", {}, path),
      h("span", { class: "summary" }, summary),
    );
    const details = h("details", { class: "operation", id }, head);
    const draw = () => {
      if (details.childElementCount === 1) details.append(this.body(operation));
    };
    details.addEventListener("toggle", () => {
      if (!details.open) return;
      draw();
      this.context.setPath(id);
    });
    return { operation, link, details, draw, text: this.searchText(operation).toLowerCase() };
  }

  /** Return the words by which an operation is found, which include the fields of its body. */
  searchText(operation) {
    const { schema: body } = bodyOf(operation);
    const forms = body?.anyOf ?? (body ? [body] : []);
    const fields = forms.flatMap((form) => Object.keys(resolve(form, this.spec).properties ?? {}));
    return [
      operation.method,
      operation.path,
      operation.summary,
      operation.description,
      operation.tags[0],
      ...fields,
    ].join(" ");
  }

  filter(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    for (const entry of this.entries) {
      const isFound = words.every((word) => entry.text.includes(word));
      entry.link.hidden = entry.details.hidden = !isFound;
    }
    const isEmpty = (section) =>
      ![...section.querySelectorAll("li:has(> a), .operation")].some(({ hidden }) => !hidden);
    for (const section of this.sections) section.hidden = isEmpty(section);
    this.none.hidden = this.entries.some(({ link }) => !link.hidden);
  }

  openPath(id) {
    const found = this.entries.find(({ operation }) => operation.operationId === id);
    if (!found) return;
    if (found.details.hidden) {
      this.search.value = "";
      this.filter("");
    }
    found.draw();
    found.details.open = true;
    found.details.scrollIntoView({ block: "start" });
    found.details.querySelector("summary").focus({ preventScroll: true });
  }

  close() {
    this.abort.abort();
  }

  // ---- one operation

  body(operation) {
    const { description, parameters = [], responses } = operation;
    const { type, schema } = bodyOf(operation);
    return h(
      "div",
      { class: "operation-body" },
      h("p", { class: "muted" }, SCOPES[operation["x-scope"]] ?? ""),
      description ? h("p", { class: "prose" }, withCode(description)) : null,
      parameters.length ? [h("h3", {}, "Parameters"), parametersView(parameters)] : null,
      schema
        ? [
            h("h3", {}, "Body ", h("span", { class: "muted" }, `${typeName(schema)}, ${type}`)),
            schemaView(schema, this.spec),
          ]
        : null,
      tryForm(operation, this.spec, this.hints, this.abort.signal),
      h("h3", {}, "Responses"),
      Object.entries(responses).map(([status, response]) => this.response(status, response)),
    );
  }

  response(status, { description, content = {} }) {
    const kinds = Object.entries(content);
    const kind = status.startsWith("2") ? "good" : "bad";
    const details = h(
      "details",
      { class: "response" },
      h("summary", {}, h("span", { class: `badge ${kind}` }, status), " ", withCode(description)),
    );
    details.addEventListener("toggle", () => {
      if (details.childElementCount > 1) return;
      details.append(
        ...kinds.map(([type, { schema, itemSchema }]) =>
          this.media(type, schema ?? (type === EVENTS ? eventData(itemSchema) : itemSchema)),
        ),
      );
    });
    return details;
  }

  media(type, schema) {
    const isJson = type === "application/json";
    const example = isJson
      ? codeBlock(JSON.stringify(exampleOf(schema, this.spec), null, 2), "example")
      : null;
    return h(
      "div",
      { class: "media" },
      h("p", { class: "muted" }, type),
      schema.type === "string" ? null : schemaView(schema, this.spec),
      example,
    );
  }
}

/** Return the media type and the schema of an operation's body; {} if it has none. */
function bodyOf({ requestBody }) {
  const [[type, { schema }] = [undefined, {}]] = Object.entries(requestBody?.content ?? {});
  return { type, schema };
}

function parametersView(parameters) {
  const rows = parameters.map(({ name, in: place, required, description, schema }) =>
    h(
      "li",
      {},
      h(
        "div",
        { class: "row" },
        h("code", { class: "name" }, name),
        required ? h("span", { class: "badge warn" }, "required") : null,
        h("span", { class: "schema-type" }, `${place}, ${typeName(schema)}`),
      ),
      h("p", {}, withCode(description)),
    ),
  );
  return h("ul", { class: "fields" }, rows);
}

/** Return the schema of a stream's data. The document describes data as JSON in a string. */
function eventData(item = {}) {
  const data = item.properties?.data ?? {};
  const parts = (data.anyOf ?? [data]).map((part) => part.contentSchema ?? part);
  return parts.length === 1 ? parts[0] : { anyOf: parts };
}

/** Return values for the fields of examples, so that they can be sent as they are. */
function hintsFor(models) {
  const message = { role: "user", content: "Hello!" };
  const isListOfLists = (schema) =>
    (schema.items?.type ?? schema.items?.anyOf?.[0]?.type) === "array";
  return {
    model: models[0]?.id ?? "MODEL",
    messages: (schema) => (isListOfLists(schema) ? [[message]] : [message]),
    max_tokens: 32,
    max_output_tokens: 32,
    prompt: "Once upon a time",
    input: "Hello!",
    completion_window: "24h",
    query: "What is a tide?",
    documents: ["The sea rises and falls.", "A fruit is sweet."],
    text_1: "What is a tide?",
    text_2: "The sea rises and falls.",
  };
}
