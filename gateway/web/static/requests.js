// Builds the bodies of chat requests, and the same requests for curl and for Python.

import { BASE, storedKey } from "./api.js";
import { NUMBERS, numberOf, problemOf, STOP, stopOf, USUAL_MAX_TOKENS } from "./fields.js";

const PATH = "v1/chat/completions";
const TOP_LOGPROBS = 5;

/** Return the JSON that a text holds. Raises Error with a message for the user. "" is `undefined`. */
export function parseJson(text, name, isRight = () => true, wanted = "") {
  if (!text?.trim()) return undefined;
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`${name} is not JSON: ${error.message}`, { cause: error });
  }
  if (!isRight(value)) throw new Error(`${name} must be ${wanted}`);
  return value;
}

export const parseTools = (text) =>
  parseJson(text, "Tools", Array.isArray, "a list of definitions");
export const parseExtra = (text) =>
  parseJson(
    text,
    "Other fields",
    (value) => value !== null && typeof value === "object" && !Array.isArray(value),
    "an object",
  );

/**
 * Return the body of a chat request. Settings that are "" are left out, so the model's defaults
 * apply. An answer has at most USUAL_MAX_TOKENS if nothing else is set.
 *
 * Raises Error if the server would refuse a setting, or if the tools or the other fields are not JSON.
 */
export function chatBody(model, messages, settings) {
  const body = {
    model,
    messages: settings.system
      ? [{ role: "system", content: settings.system }, ...messages]
      : messages,
  };
  for (const field of NUMBERS) {
    const value = checked(field, numberOf(settings[field.name]), settings[field.name]);
    if (value !== undefined) body[field.name] = value;
  }
  const stop = checked(STOP, stopOf(settings.stop));
  if (stop.length) body.stop = stop;
  if (settings.reasoning_effort) body.reasoning_effort = settings.reasoning_effort;
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: TOP_LOGPROBS });
  const tools = parseTools(settings.tools);
  if (tools?.length) body.tools = tools;
  const extra = parseExtra(settings.extra);
  if (!extra || !("max_completion_tokens" in extra)) body.max_tokens ??= USUAL_MAX_TOKENS;
  return { ...body, ...extra };
}

/** Return the value of a field. Raises Error with its bounds if the server would refuse it. */
function checked({ name, label }, value, text) {
  const problem = problemOf(name, value);
  if (problem) throw new Error(`${label} ${problem}${text ? `, not ${text.trim()}` : ""}.`);
  return value;
}

/** Return the fields that this page adds to show progress, speed and token counts. */
export function streamed(body) {
  return {
    ...body,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    timings: true,
  };
}

/** Return the messages of a conversation in the shape of the API. */
export function apiMessages(messages) {
  return messages.map(({ role, content, reasoning, calls, callId, files }) => {
    if (role === "user") return { role, content: userContent(content, files) };
    if (role === "tool") return { role, tool_call_id: callId, content };
    if (role !== "assistant" || !calls?.length) return { role, content };
    const tool_calls = calls.map(({ id, name, args }) => ({
      id,
      type: "function",
      function: { name, arguments: args },
    }));
    // A model that reasons between its calls needs what it thought before them.
    return { role, content: content || null, tool_calls, ...(reasoning ? { reasoning } : {}) };
  });
}

/** Return the content of a message with files: a text, or parts if some files are images. */
function userContent(content, files = []) {
  const text = withFiles(
    content,
    files.filter(({ image }) => !image),
  );
  const images = files.filter(({ image }) => image);
  if (!images.length) return text;
  return [
    ...images.map(({ image }) => ({ type: "image_url", image_url: { url: image.url } })),
    ...(text ? [{ type: "text", text }] : []),
  ];
}

/** Return a text with files ({ name, text }) before it. Each has its name, and a fence that is longer than
 * those in it, so a file cannot end its own part. */
export function withFiles(content, files = []) {
  const parts = files.map(({ name, text }) => {
    const runs = text.match(/`{3,}/g) ?? [];
    const fence = "`".repeat(runs.reduce((most, { length }) => Math.max(most, length + 1), 3));
    return `File ${JSON.stringify(name)}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...parts, content].filter(Boolean).join("\n\n");
}

/** Return the fields that make an answer go on where the last of these messages ends. */
export function continued(messages) {
  const { content, reasoning } = messages.at(-1);
  const final = { role: "assistant", content, ...(reasoning ? { reasoning } : {}) };
  return {
    messages: [...apiMessages(messages.slice(0, -1)), final],
    continue_final_message: true,
    add_generation_prompt: false,
  };
}

/** Return a curl command that sends a chat request. */
export function chatCurl(body) {
  return asCurl(PATH, "POST", curlJson(JSON.stringify(body, null, 2)));
}

/** Return a curl command. `body` is its arguments for the body. It reads the key from the environment. */
export function asCurl(path, method, body = []) {
  const isUsual = method === (body.length ? "POST" : "GET");
  const lines = [`curl ${isUsual ? "" : `-X ${method} `}${shellQuoted(new URL(path, BASE).href)}`];
  if (storedKey()) lines.push('-H "Authorization: Bearer $TIDEGATE_API_KEY"');
  return [...lines, ...body].join(" \\\n  ");
}

/** Return curl's arguments for a body of JSON text. */
export function curlJson(text) {
  return ["-H 'Content-Type: application/json'", `-d ${shellQuoted(text)}`];
}

export function shellQuoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

/** Return a Python program that sends a chat request with OpenAI's client. */
export function asPython(body) {
  const { known, extra } = splitFields(body);
  const key = storedKey() ? 'os.environ["TIDEGATE_API_KEY"]' : '"none"';
  const fields = Object.entries(known).map(
    ([name, value]) => `    ${name}=${pythonValue(value, 1)},`,
  );
  if (Object.keys(extra).length) fields.push(`    extra_body=${pythonValue(extra, 1)},`);
  return [
    ...(storedKey() ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${pythonValue(new URL("v1", BASE).href)}, api_key=${key})`,
    "stream = client.chat.completions.create(",
    ...fields,
    "    stream=True,",
    ")",
    "for chunk in stream:",
    "    if chunk.choices:",
    '        print(chunk.choices[0].delta.content or "", end="", flush=True)',
    "",
  ].join("\n");
}

/** The fields that OpenAI's client has as arguments. It sends all others as `extra_body`. */
const CLIENT_FIELDS = new Set([
  "model",
  "messages",
  "temperature",
  "top_p",
  "frequency_penalty",
  "presence_penalty",
  "max_tokens",
  "seed",
  "stop",
  "reasoning_effort",
  "logprobs",
  "top_logprobs",
  "tools",
  "tool_choice",
  "n",
  "response_format",
  "logit_bias",
  "max_completion_tokens",
  "parallel_tool_calls",
  "user",
  "metadata",
  "store",
]);

function splitFields(body) {
  const known = {};
  const extra = {};
  for (const [name, value] of Object.entries(body))
    (CLIENT_FIELDS.has(name) ? known : extra)[name] = value;
  return { known, extra };
}

/** Return a JSON value as Python writes it. */
export function pythonValue(value, depth = 0) {
  const indent = "    ".repeat(depth + 1);
  const end = "    ".repeat(depth);
  if (value === null || value === undefined) return "None";
  if (value === true || value === false) return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const isList = Array.isArray(value);
  const items = isList
    ? value.map((each) => `${indent}${pythonValue(each, depth + 1)},\n`)
    : Object.entries(value).map(
        ([name, each]) => `${indent}${JSON.stringify(name)}: ${pythonValue(each, depth + 1)},\n`,
      );
  const [open, close] = isList ? "[]" : "{}";
  return items.length ? `${open}\n${items.join("")}${end}${close}` : open + close;
}
