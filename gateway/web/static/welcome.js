// What a conversation without messages shows: its model, and messages to begin with.

import { h } from "./dom.js";
import { stateOf } from "./models.js";

/** Messages that a model of 135M parameters answers without repeating itself to the token limit. */
const SUGGESTIONS = [
  "Give me three tips for a good night's sleep.",
  "Why is the sky blue?",
  "List five animals that live in the sea.",
];

/** Return the view. model: an entry of GET /v1/models, or null. send(text): sends a suggestion. */
export function welcome(model, send) {
  const size = model ? `${model.max_model_len.toLocaleString("en")} tokens` : "";
  const facts = [model?.id, size, stateOf(model)].filter(Boolean).join(" · ");
  const suggestions = SUGGESTIONS.map((text) =>
    h("button", { type: "button", class: "button", onclick: () => send(text) }, text),
  );
  return h(
    "div",
    { class: "empty" },
    h("h2", {}, "What do you want to ask?"),
    h("p", { class: "muted" }, facts),
    h("div", { class: "suggestions" }, suggestions),
  );
}
