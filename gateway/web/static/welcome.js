// What a conversation without messages shows: its model, and messages to begin with.

import { h } from "./dom.js";
import { stateOf } from "./models.js";
import { presetOf, presets } from "./presets.js";

/** Messages that a model of 135M parameters answers without repeating itself to the token limit. */
const SUGGESTIONS = [
  "Give me three tips for a good night's sleep.",
  "Why is the sky blue?",
  "List five animals that live in the sea.",
];

/**
 * Return the view.
 *
 * model     an entry of GET /v1/models, or null
 * settings  those of the conversation
 * send      sends a text
 * choose    takes over the settings of a preset
 */
export function welcome({ model, settings, send, choose }) {
  const size = model ? `${model.max_model_len.toLocaleString("en")} tokens` : "";
  const facts = [model?.id, size, stateOf(model)].filter(Boolean).join(" · ");
  const own = presetOf(settings);
  const button = (text, attributes) => h("button", { type: "button", ...attributes }, text);
  const presetButton = ({ name, settings: chosen }, isOn) =>
    button(name, {
      class: "button small",
      "aria-pressed": String(isOn),
      onclick: () => choose(isOn ? {} : { ...chosen }),
    });
  const all = presets();
  return h(
    "div",
    { class: "empty" },
    h("h2", {}, "What do you want to ask?"),
    h("p", { class: "muted" }, facts),
    all.length
      ? h(
          "div",
          { class: "preset-choice", role: "group", "aria-label": "Presets" },
          all.map((preset) => presetButton(preset, preset.id === own?.id)),
        )
      : null,
    h(
      "div",
      { class: "suggestions" },
      SUGGESTIONS.map((text) => button(text, { class: "button", onclick: () => send(text) })),
    ),
  );
}
