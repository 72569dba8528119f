// What a conversation without messages shows: its model, and messages to begin with.

import { h } from "./dom.js";
import { stateOf } from "./models.js";

const SUGGESTIONS = [
  "Name three fruits, with a table of their colours.",
  "Write a haiku about the sea.",
  "Explain what a tide is to a child.",
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
