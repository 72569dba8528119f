// The form of the reference that sends a request and shows its response.

import { errorBox, send } from "./api.js";
import { copyButton, fill, h, iconButton } from "./dom.js";
import { pretty } from "./message-view.js";
import { asCurl, curlJson, shellQuoted } from "./requests.js";
import { exampleOf, resolve } from "./schema.js";

const MAX_SHOWN_CHARS = 1_000_000;

/**
 * Return the form for an operation of the OpenAPI document `spec`.
 *
 * operation   the operation with its `path` and `method`
 * hints       values for the fields of examples (schema.js)
 * signal      ends a request when the reference is closed
 */
export function tryForm(operation, spec, hints, signal) {
  const { operationId: id, method, path, parameters = [], requestBody } = operation;
  const inputs = parameters.map((parameter) => ({
    parameter,
    input: h("input", { id: `${id}-${parameter.name}`, placeholder: parameter.in }),
  }));
  const [[type, { schema }] = [null, {}]] = Object.entries(requestBody?.content ?? {});
  const { fields, read, curl } = (BODIES[type] ?? noBody)(id, schema, spec, hints);
  const result = h("div", { class: "result", "aria-live": "polite" });
  const button = h("button", { type: "submit", class: "button primary" }, "Send");
  const command = copyButton("Copy as curl", () =>
    asCurl(targetOf(path, inputs).path, method.toUpperCase(), curl()),
  );
  const form = h(
    "form",
    { class: "card try" },
    h("h3", {}, "Try it"),
    inputs.map(({ parameter, input }) => labelled(parameter.name, input)),
    fields,
    h("div", { class: "row" }, button, command),
    result,
  );
  let running = null;
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (running) return running.abort();
    running = new AbortController();
    fill(button, "Stop");
    const { path: full, headers } = targetOf(path, inputs);
    const options = { method: method.toUpperCase(), body: read(), headers };
    options.signal = AbortSignal.any([running.signal, signal]);
    await showResponse(result, () => send(full, options));
    running = null;
    return fill(button, "Send");
  });
  return form;
}

function labelled(name, input) {
  return h("div", { class: "field" }, h("label", { for: input.id }, name), input);
}

// ---- bodies: { fields, read(), curl() }, the elements, the body to send, and curl's arguments

function noBody() {
  return { fields: null, read: () => undefined, curl: () => [] };
}

function jsonBody(id, schema, spec, hints) {
  const example = JSON.stringify(exampleOf(schema, spec, hints), null, 2);
  const rows = Math.min(16, example.split("\n").length + 1);
  const input = h("textarea", { id: `${id}-body`, class: "mono", rows, spellcheck: "false" });
  input.value = example;
  const curl = () => curlJson(input.value);
  return { fields: labelled("Body", input), read: () => input.value, curl };
}

function formBody(id, schema, spec, hints) {
  const { properties } = resolve(schema, spec);
  const example = exampleOf(schema, spec, hints);
  const inputs = Object.entries(properties).map(([name, { format }]) => {
    const type = format === "binary" ? "file" : "text";
    const input = h("input", { id: `${id}-${name}`, type, name });
    if (type === "text") input.value = example[name] ?? "";
    return input;
  });
  const given = () => inputs.filter(({ value }) => value);
  const read = () => {
    const data = new FormData();
    for (const input of given()) data.append(input.name, input.files?.[0] ?? input.value);
    return data;
  };
  const curl = () =>
    given().map(
      ({ name, value, files }) =>
        `-F ${shellQuoted(files ? `${name}=@${files[0].name}` : `${name}=${value}`)}`,
    );
  return { fields: inputs.map((input) => labelled(input.name, input)), read, curl };
}

const BODIES = { "application/json": jsonBody, "multipart/form-data": formBody };

// ---- target and response

/** Return the path with its variables and its query, and the headers, that were entered. */
function targetOf(path, inputs) {
  const query = new URLSearchParams();
  const headers = {};
  let full = path.slice(1);
  for (const { parameter, input } of inputs) {
    const { name, in: place } = parameter;
    const value = input.value.trim();
    if (place === "path") full = full.replace(`{${name}}`, encodeURIComponent(value || name));
    else if (value && place === "query") query.set(name, value);
    else if (value) headers[name] = value;
  }
  return { path: query.size ? `${full}?${query}` : full, headers };
}

/** Send a request and show its response as it arrives. */
async function showResponse(element, fetchResponse) {
  const started = performance.now();
  fill(element, h("p", { class: "muted" }, "Sending…"));
  try {
    const response = await fetchResponse();
    const kind = response.ok ? "good" : "bad";
    const status = `${response.status} ${response.statusText}`;
    const took = h("span", {}, "…");
    const facts = h(
      "p",
      { class: "facts" },
      h("span", { class: `badge ${kind}` }, status),
      took,
      h("span", {}, "Request ", h("code", {}, response.headers.get("x-request-id") ?? "?")),
    );
    const code = h("code");
    const close = iconButton("close", "Close the response", () => fill(element));
    const shown = h("pre", { class: "shown", tabindex: 0 }, code);
    fill(element, h("div", { class: "row" }, facts, close), shown);
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
