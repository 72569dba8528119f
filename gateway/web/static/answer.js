// Streams one answer of the model into a message object, which the views show.
//
// A message: { id, role, content, made, reasoning, calls, logprobs, tokenIds, finish, usage, timings,
// ... } made: when, in ms. calls: [{ id, name, args }], where `args` is the JSON text that has arrived.

import { streamEvents } from "./api.js";
import { fetchModels, isAsleep, loadingTime } from "./models.js";

const PATH = "v1/chat/completions";
const LOOK_MS = 1000; // how often to look whether an answer that has not begun waits for its model
export const LOADING = "The model is loading …";
export const WITH_LOADING = ", with the loading of the model";
const FINISHED = {
  length: "The answer reached its token limit.",
  abort: "The server ended the answer.",
  stopped: "Stopped.",
  interrupted: "The page was closed before the answer was complete.",
};
const CUT = new Set(Object.keys(FINISHED)); // ends after which the model had more to say

/** Return an id that nothing else has. Only pages over https, or of localhost, have randomUUID. */
export function newId() {
  return crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;
}

export function newMessage(role, content = "") {
  return { id: newId(), role, content, made: Date.now() };
}

/** Return an empty answer. It keeps the model and the settings, so its request can be shown. */
export function newAnswer(model, settings) {
  return {
    ...newMessage("assistant"),
    model,
    settings: { ...settings },
    reasoning: "",
    calls: [],
    finish: null,
    tokens: 0,
    isLoading: false, // waits until its model is loaded
    hasLoaded: false, // has waited for that
  };
}

/** Return whether an answer ended before the model had finished it, in a text that can go on. */
export function canContinue({ finish, error, content, reasoning, calls }) {
  const wasCut = CUT.has(finish) || Boolean(error);
  return wasCut && Boolean(content.trim() || reasoning) && !calls.length;
}

/**
 * Prepare an answer for the rest of its text. Its tokens are counted on; its times and speed will be
 * those of the rest. Blanks at its end are dropped: they are part of the next word's token, so the
 * model writes them again.
 */
export function reopen(message) {
  const name = message.content.trim() ? "content" : "reasoning";
  message[name] = message[name].replace(/[ \t]+$/, "");
  if (name === "reasoning") message.content = "";
  for (const fact of ["error", "usage", "timings", "firstMs", "lastMs"]) delete message[fact];
  Object.assign(message, { finish: null, hasLoaded: false, tokensBefore: message.tokens });
}

/**
 * Stream the answer to `body` into `message`, and call `onChange` after each change.
 *
 * A failure becomes `message.error`. An abort through `signal` sets `message.finish` to "stopped".
 */
export async function streamAnswer(message, body, signal, onChange) {
  const started = performance.now();
  let hasBegun = false;
  const look = () => {
    if (hasBegun) return;
    message.isLoading = isAsleep(message.model);
    onChange();
  };
  const looking = setInterval(() => hasBegun || fetchModels().then(look, () => {}), LOOK_MS);
  look();
  try {
    for await (const { data, requestId } of streamEvents(PATH, body, { signal })) {
      message.requestId = requestId;
      hasBegun = true;
      applyChunk(message, data, performance.now() - started);
      onChange();
    }
    if (message.finish === null)
      throw new Error("The connection was lost before the answer was complete.");
  } catch (error) {
    if (error.name === "AbortError" || signal.aborted) message.finish = "stopped";
    else message.error = plainError(error);
  }
  hasBegun = true;
  clearInterval(looking);
  message.isLoading = false;
  message.tookMs = performance.now() - started;
  onChange();
}

function applyChunk(message, chunk, nowMs) {
  message.hasLoaded ||= message.isLoading;
  message.isLoading = false;
  if (chunk.usage) {
    message.usage = chunk.usage;
    message.tokens = (message.tokensBefore ?? 0) + chunk.usage.completion_tokens;
  }
  if (chunk.timings) message.timings = chunk.timings;
  if (chunk.warnings) message.warnings = chunk.warnings.map((warning) => warning.message);
  if (chunk.ignored_params) message.ignored = chunk.ignored_params;
  const choice = chunk.choices[0];
  if (!choice) return;
  const { delta } = choice;
  const hasOutput = delta.content || delta.reasoning || delta.reasoning_content || delta.tool_calls;
  if (hasOutput) {
    message.firstMs ??= nowMs;
    message.lastMs = nowMs;
  }
  message.content += delta.content ?? "";
  message.reasoning += delta.reasoning ?? delta.reasoning_content ?? "";
  for (const part of delta.tool_calls ?? []) {
    const call = (message.calls[part.index] ??= { id: "", name: "", args: "" });
    call.id = part.id ?? call.id;
    call.name = part.function.name ?? call.name;
    call.args += part.function.arguments ?? "";
  }
  if (choice.logprobs?.content)
    (message.logprobs ??= []).push(...choice.logprobs.content);
  if (choice.token_ids) (message.tokenIds ??= []).push(...choice.token_ids);
  if (choice.finish_reason) message.finish = choice.finish_reason;
}

/** Return the parts of an error that `errorBox` shows, as an object that can be stored. */
function plainError({ message, status, code, param, requestId, retryAfterS, help }) {
  return { message, status, code, param, requestId, retryAfterS, help };
}

/** Return the token counts and speeds of an answer, in words: ["42 tokens", "31.5 tokens/s"]. */
export function describeSpeed(message) {
  const { timings, usage, tokens, firstMs, lastMs } = message;
  const streamed = tokens - (message.tokensBefore ?? 0);
  const facts = [];
  if (tokens) facts.push(`${counted(tokens)} token${tokens === 1 ? "" : "s"}`);
  const perSecond =
    timings?.predicted_per_second ??
    (streamed > 1 && lastMs > firstMs ? ((streamed - 1) / (lastMs - firstMs)) * 1000 : null);
  if (perSecond) facts.push(`${perSecond.toFixed(perSecond < 100 ? 1 : 0)} tokens/s`);
  const first = describeFirstToken(message);
  if (first) facts.push(`first token after ${first}`);
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    facts.push(
      `prompt ${counted(usage.prompt_tokens)}${cached ? `, ${counted(cached)} cached` : ""}`,
    );
  }
  return facts;
}

/** Return the time to the first token, and whether the model was loaded in it; "" if there is none. */
export function describeFirstToken({ timings, firstMs, hasLoaded }) {
  const ms = timings?.first_token_ms ?? firstMs ?? null;
  return ms === null ? "" : `${inWords(ms)}${hasLoaded ? WITH_LOADING : ""}`;
}

function counted(number) {
  return number.toLocaleString("en");
}

/** Return what an answer waits for while its model is not ready. */
export function describeLoading({ model }) {
  return [`Loading ${model} …`, loadingTime(model)].filter(Boolean).join(", ");
}

/** Return why an answer ended, if the user may want to know it; otherwise "". */
export function describeEnd(message) {
  return FINISHED[message.finish] ?? "";
}

export function inWords(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}
