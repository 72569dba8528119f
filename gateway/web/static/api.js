// Requests to the server. All parts of the page use these functions:
//
//   const { data } = await getJson("v1/models");
//   for await (const event of streamEvents("v1/chat/completions", body, { signal })) { ... }
//
// A refusal raises ApiError, which `errorBox` shows. If the server requires a key, the functions
// ask the user for it and try again. The key is kept in sessionStorage, so it is forgotten when the
// tab is closed, and it is only ever sent in the Authorization header.

import { h } from "./dom.js";

const KEY = "tidegate.key";
/** The address of the server, which a proxy may have given a path of its own. */
export const BASE = new URL("../", import.meta.url);
export const KEY_CHANGED = "tidegate-key-changed";

let memoryKey = "";

export function storedKey() {
  try {
    return sessionStorage.getItem(KEY) ?? memoryKey;
  } catch {
    return memoryKey;
  }
}

export function storeKey(key) {
  memoryKey = key;
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch {
    // Storage is disabled: the key is lost when the page is loaded again.
  }
  dispatchEvent(new Event(KEY_CHANGED));
}

let askForKey = async () => null;
let asking = null;

/** Set the function that asks the user for a key. It gets why the last one was refused ("": there
 * was none), and returns the key, or null if the user has cancelled. */
export function onKeyNeeded(ask) {
  askForKey = ask;
}

/** A refusal of the server, or a failed connection (status 0). */
export class ApiError extends Error {
  constructor(message, details = {}) {
    super(message);
    this.status = details.status ?? 0;
    this.code = details.code ?? null;
    this.param = details.param ?? null;
    this.requestId = details.requestId ?? null;
    this.retryAfterS = details.retryAfterS ?? null;
    this.help = details.help ?? null;
  }

  /** Make the error of a response whose status is not 2xx. */
  static async fromResponse(response) {
    const text = await response.text().catch(() => "");
    let error = {};
    try {
      error = JSON.parse(text).error ?? {};
      if (typeof error === "string") error = { message: error }; // as Ollama's API has it
    } catch {
      // A proxy between this page and the server has answered.
    }
    const header = (name) => response.headers.get(name);
    return new ApiError(error.message ?? `${response.status} ${response.statusText}`, {
      status: response.status,
      code: error.code,
      param: error.param,
      requestId: header("x-request-id"),
      retryAfterS: header("retry-after"),
      help: header("link")?.match(/<([^>]*)>; rel="help"/)?.[1],
    });
  }
}

/**
 * Send a request and return the response, whatever its status.
 *
 * path     relative to the server, without a slash at its start: "v1/models"
 * options  method (default: POST if there is a body, else GET), body (an object, JSON text, or a form),
 *          headers, signal
 */
export async function send(path, { method, body, headers = {}, signal } = {}) {
  const all = { Accept: "application/json, text/event-stream, */*", ...headers };
  const key = storedKey();
  if (key) all.Authorization = `Bearer ${key}`;
  const isForm = body instanceof FormData; // the browser adds its content type
  if (body !== undefined && !isForm) all["Content-Type"] = "application/json";
  try {
    return await fetch(new URL(path, BASE), {
      method: method ?? (body === undefined ? "GET" : "POST"),
      headers: all,
      body: isForm || body === undefined || typeof body === "string" ? body : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(
      "The server does not answer. It may have stopped, or the connection is lost.",
    );
  }
}

/** Send a request and return its successful response. Raises ApiError. Asks for a missing key. */
export async function request(path, options = {}) {
  for (;;) {
    const key = storedKey();
    const response = await send(path, options);
    if (response.ok) return response;
    const error = await ApiError.fromResponse(response);
    if (error.status !== 401) throw error;
    if (storedKey() === key) {
      // Several requests may be refused at the same time. The user is asked once.
      asking ??= askForKey(key ? error.message : "").finally(() => (asking = null));
      const given = await asking;
      if (given === null)
        throw new ApiError("The server needs an API key, and none was entered.", { status: 401 });
      storeKey(given);
    }
  }
}

export async function getJson(path, options) {
  return (await request(path, options)).json();
}

/**
 * Yield the events of a stream: { event, id, data }. `data` is decoded JSON. The stream ends with
 * the connection or with [DONE]. Raises ApiError if the server reports an error inside the stream.
 */
export async function* streamEvents(path, body, options = {}) {
  const response = await request(path, { body, ...options });
  const requestId = response.headers.get("x-request-id");
  for await (const { event, id, data } of readEvents(response.body)) {
    if (data === "[DONE]") return;
    const decoded = JSON.parse(data);
    if (decoded.error?.message)
      throw new ApiError(decoded.error.message, { ...decoded.error, status: 200, requestId });
    yield { event, id, data: decoded, requestId };
  }
}

/** Yield the events of a body of server-sent events, with `data` as text. */
export async function* readEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      held += value;
      // An event ends with an empty line. A carriage return at the end may be half of a line break.
      const parts = held.replace(/\r\n/g, "\n").split("\n\n");
      held = parts.pop();
      for (const part of parts) {
        const found = readEvent(part);
        if (found !== null) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function readEvent(text) {
  const event = { event: "message", id: null, data: null };
  const lines = [];
  for (const line of text.split("\n")) {
    const colon = line.indexOf(":");
    if (colon === 0) continue; // a comment, which keeps the connection alive
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "data") lines.push(value);
    else if (name === "event" || name === "id") event[name] = value;
  }
  if (!lines.length) return null;
  event.data = lines.join("\n");
  return event;
}

/** Return an element that shows an error: its message, the field at fault, and the request's id. */
export function errorBox(error) {
  const facts = [];
  if (error.param) facts.push(["Field", error.param]);
  if (error.status) facts.push(["Status", String(error.status)]);
  if (error.retryAfterS) facts.push(["Retry after", `${error.retryAfterS} s`]);
  if (error.requestId) facts.push(["Request", error.requestId]);
  const rows = facts.map(([name, value]) => h("span", {}, `${name} `, h("code", {}, value)));
  // The server's own links are absolute paths. A proxy may have put it under another path.
  const help = error.help?.startsWith("/")
    ? h("a", { href: new URL(error.help.slice(1), BASE).href }, "Reference")
    : null;
  const details = rows.length || help ? h("p", { class: "facts" }, rows, help) : null;
  return h("div", { class: "notice bad", role: "alert" }, h("p", {}, error.message), details);
}
