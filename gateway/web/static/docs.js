// The reference: all routes of this server, from its own OpenAPI document.

import { BASE, errorBox, getJson, send } from "./api.js";
import { copyButton, fill, h, iconButton, loadStyle } from "./dom.js";
import { codeBlock } from "./markdown.js";
import { pretty } from "./message-view.js";
import { fetchModels } from "./models.js";
import { asCurl } from "./requests.js";
import { exampleOf, resolve, schemaView, typeName } from "./schema.js";

const TAGS = ["OpenAI", "Responses", "Anthropic", "Tokens", "Rendering", "Operators"]; // first; others follow
const SCOPES = { public: "no key needed", inference: "scope inference", metrics: "scope metrics", admin: "scope admin" };
const MAX_SHOWN_CHARS = 1_000_000;

export async function mount(root, context) {
  await Promise.all([loadStyle("chat.css"), loadStyle("docs.css")]);
  fill(root, h("p", { class: "muted page-note" }, "Loading…"));
  try {
    const [spec, models] = await Promise.all([getJson("openapi.json"), fetchModels().catch(() => [])]);
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
    const tags = [...new Set(operations.map(({ tags: [tag] }) => tag))].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
    this.hints = hintsFor(models);
    this.entries = operations.map((operation) => this.entry(operation));
    this.groups = tags.map((tag) => ({ tag, entries: this.entries.filter(({ operation }) => operation.tags[0] === tag) }));
    this.build();
  }

  build() {
    const { info } = this.spec;
    const search = h("input", { type: "search", placeholder: "Search routes and fields", "aria-label": "Search routes and fields", oninput: () => this.filter(search.value) });
    this.none = h("p", { class: "muted", hidden: true }, "Nothing is found.");
    const menu = this.groups.map(({ tag, entries }) => h("section", {}, h("h2", {}, tag), h("ul", {}, entries.map(({ link }) => link))));
    const content = this.groups.map(({ tag, entries }) => h("section", { class: "group" }, h("h2", {}, tag), entries.map(({ details }) => details)));
    this.sections = [...menu, ...content];
    const base = BASE.href.replace(/\/$/, "");
    fill(
      this.root,
      h("nav", { class: "docs-menu", "aria-label": "Routes" }, search, this.none, menu),
      h(
        "div",
        { class: "docs-body" },
        h("h1", {}, `${info.title} ${info.version}`),
        h("p", {}, "All routes of this server, as ", h("a", { href: new URL("openapi.json", BASE).href, download: "openapi.json" }, "openapi.json"), " describes them. OpenAI's clients use the address ", h("code", {}, `${base}/v1`), ", Anthropic's ", h("code", {}, base), "."),
        h("p", {}, "If the server has keys, send one as ", h("code", {}, "Authorization: Bearer KEY"), " or ", h("code", {}, "x-api-key: KEY"), ". Every answer has an ", h("code", {}, "x-request-id"), ", by which the server's log names the request."),
        content,
      ),
    );
  }

  /** Return one operation's link and its folded description, which is drawn when it is opened. */
  entry(operation) {
    const { operationId: id, path, method, summary } = operation;
    const badge = () => h("span", { class: `method ${method}` }, method === "delete" ? "DEL" : method.toUpperCase());
    const address = new URL(`docs#${id}`, BASE).href;
    const parts = path.split(/(?=[/_])/).map((part) => [h("wbr"), part]); // a long path breaks here
    const link = h("li", {}, h("a", { href: address }, badge(), h("span", {}, parts)));
    const head = h("summary", { id: `head-${id}` }, badge(), h("code", {}, path), h("span", { class: "summary" }, summary));
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

  /** Return the words by which an operation is found: its path, its description, and the fields of its body. */
  searchText(operation) {
    const body = operation.requestBody?.content?.["application/json"]?.schema;
    const forms = body?.anyOf ?? (body ? [body] : []);
    const fields = forms.flatMap((form) => Object.keys(resolve(form, this.spec).properties ?? {}));
    return [operation.method, operation.path, operation.summary, operation.description, operation.tags[0], ...fields].join(" ");
  }

  filter(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    for (const entry of this.entries) {
      const isFound = words.every((word) => entry.text.includes(word));
      entry.link.hidden = entry.details.hidden = !isFound;
    }
    const isEmpty = (section) => ![...section.querySelectorAll("li:has(> a), .operation")].some(({ hidden }) => !hidden);
    for (const section of this.sections) section.hidden = isEmpty(section);
    this.none.hidden = this.entries.some(({ link }) => !link.hidden);
  }

  openPath(id) {
    const found = this.entries.find(({ operation }) => operation.operationId === id);
    if (!found) return;
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
    const { description, parameters = [], requestBody, responses } = operation;
    const schema = requestBody?.content?.["application/json"]?.schema;
    return h(
      "div",
      { class: "operation-body" },
      h("p", { class: "muted" }, SCOPES[operation["x-scope"]] ?? ""),
      description ? h("p", { class: "prose" }, description) : null,
      parameters.length ? [h("h3", {}, "Parameters"), parametersView(parameters)] : null,
      schema ? [h("h3", {}, "Body ", h("span", { class: "muted" }, typeName(schema))), schemaView(schema, this.spec)] : null,
      this.tryIt(operation, schema),
      h("h3", {}, "Responses"),
      Object.entries(responses).map(([status, response]) => this.response(status, response)),
    );
  }

  response(status, { description, content = {} }) {
    const kinds = Object.entries(content);
    const kind = status.startsWith("2") ? "good" : "bad";
    const details = h("details", { class: "response" }, h("summary", {}, h("span", { class: `badge ${kind}` }, status), " ", description));
    details.addEventListener("toggle", () => {
      if (details.childElementCount > 1) return;
      details.append(...kinds.map(([type, { schema, itemSchema }]) => this.media(type, schema ?? eventData(itemSchema))));
    });
    return details;
  }

  media(type, schema) {
    const isJson = type === "application/json";
    const example = isJson ? codeBlock(JSON.stringify(exampleOf(schema, this.spec), null, 2), "example") : null;
    return h("div", { class: "media" }, h("p", { class: "muted" }, type), type.startsWith("text/") && type !== "text/event-stream" ? null : schemaView(schema, this.spec), example);
  }

  // ---- try it

  tryIt(operation, schema) {
    const { operationId: id, method, path, parameters = [] } = operation;
    const inputs = parameters.map((parameter) => ({ parameter, input: h("input", { id: `${id}-${parameter.name}`, placeholder: parameter.in }) }));
    const example = schema ? JSON.stringify(exampleOf(schema, this.spec, this.hints), null, 2) : null;
    const body = schema ? h("textarea", { id: `${id}-body`, class: "mono", rows: Math.min(16, example.split("\n").length + 1), spellcheck: "false", value: example }) : null;
    const result = h("div", { class: "result", "aria-live": "polite" });
    const button = h("button", { type: "submit", class: "button primary" }, "Send");
    const target = () => targetOf(path, inputs);
    const command = copyButton("Copy as curl", () => asCurl(parsed(body?.value), target().path, method.toUpperCase()));
    const form = h(
      "form",
      { class: "card try" },
      h("h3", {}, "Try it"),
      inputs.map(({ parameter, input }) => h("div", { class: "field" }, h("label", { for: input.id }, parameter.name), input)),
      body ? h("div", { class: "field" }, h("label", { for: body.id }, "Body"), body) : null,
      h("div", { class: "row" }, button, command),
      result,
    );
    let running = null;
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      if (running) return running.abort();
      running = new AbortController();
      fill(button, "Stop");
      const { path: full, headers } = target();
      const signal = AbortSignal.any([running.signal, this.abort.signal]);
      await showResponse(result, () => send(full, { method: method.toUpperCase(), body: body?.value, headers, signal }));
      running = null;
      return fill(button, "Send");
    });
    return form;
  }
}

function parametersView(parameters) {
  const rows = parameters.map(({ name, in: place, required, description, schema }) =>
    h("li", {}, h("div", { class: "row" }, h("code", { class: "name" }, name), required ? h("span", { class: "badge warn" }, "required") : null, h("span", { class: "schema-type" }, `${place}, ${typeName(schema)}`)), h("p", {}, description)),
  );
  return h("ul", { class: "fields" }, rows);
}

/** Return the schema of a stream's data. The document describes an event whose data is JSON in a string. */
function eventData(item = {}) {
  const data = item.properties?.data ?? {};
  const parts = (data.anyOf ?? [data]).map((part) => part.contentSchema ?? part);
  return parts.length === 1 ? parts[0] : { anyOf: parts };
}

/** Return the path with its variables and its query, and the headers, that were entered. */
function targetOf(path, inputs) {
  const query = new URLSearchParams();
  const headers = {};
  let full = path.slice(1);
  for (const { parameter, input } of inputs) {
    const value = input.value.trim();
    if (parameter.in === "path") full = full.replace(`{${parameter.name}}`, encodeURIComponent(value || parameter.name));
    else if (value && parameter.in === "query") query.set(parameter.name, value);
    else if (value) headers[parameter.name] = value;
  }
  return { path: query.size ? `${full}?${query}` : full, headers };
}

/** Send a request and show its response as it arrives. */
async function showResponse(element, fetchResponse) {
  const started = performance.now();
  fill(element, h("p", { class: "muted" }, "Sending…"));
  try {
    const response = await fetchResponse();
    const status = h("span", { class: `badge ${response.ok ? "good" : "bad"}` }, `${response.status} ${response.statusText}`);
    const took = h("span", {}, "…");
    const facts = h("p", { class: "facts" }, status, took, h("span", {}, "Request ", h("code", {}, response.headers.get("x-request-id") ?? "?")));
    const code = h("code");
    const close = iconButton("close", "Close the response", () => fill(element));
    fill(element, h("div", { class: "row" }, facts, close), h("pre", { class: "shown", tabindex: 0 }, code));
    let text = "";
    for await (const part of chunksOf(response.body)) {
      text += part;
      if (text.length <= MAX_SHOWN_CHARS) code.append(part);
    }
    if (text.length <= MAX_SHOWN_CHARS) code.textContent = pretty(text);
    took.textContent = `${Math.round(performance.now() - started)} ms`;
  } catch (error) {
    if (error.name === "AbortError") element.append(h("p", { class: "muted" }, "Stopped."));
    else fill(element, errorBox(error));
  }
}

async function* chunksOf(stream) {
  if (!stream) return;
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    yield value;
  }
}

function parsed(text) {
  if (text === undefined) return undefined;
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

/** Return values for the fields of examples, so that they can be sent as they are. */
function hintsFor(models) {
  const message = { role: "user", content: "Hello!" };
  const isListOfLists = (schema) => (schema.items?.type ?? schema.items?.anyOf?.[0]?.type) === "array";
  return {
    model: models[0]?.id ?? "MODEL",
    messages: (schema) => (isListOfLists(schema) ? [[message]] : [message]),
    max_tokens: 32,
    max_output_tokens: 32,
    prompt: "Once upon a time",
    input: "Hello!",
  };
}
