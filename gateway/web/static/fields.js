// The fields of a chat request that the settings show as numbers and lines, and their bounds. The
// bounds are those of the server's own /openapi.json, so the page refuses what the server would.

import { getJson } from "./api.js";
import { resolve } from "./schema.js";

/** The most tokens of an answer if the user sets none: a small model may repeat itself forever. */
export const USUAL_MAX_TOKENS = 1024;

/**
 * label     as in the form
 * unit      what the arrow keys add
 * fallback  what applies if neither the user nor the model sets it: a number, or words
 * isRare    whether the form shows it among "More samplers" only
 */
export const NUMBERS = [
  { name: "temperature", label: "Temperature", unit: 0.1, about: "0: always the likeliest token" },
  { name: "top_p", label: "Top p", unit: 0.05 },
  { name: "top_k", label: "Top k", unit: 1, about: "0: no limit" },
  { name: "min_p", label: "Min p", unit: 0.01 },
  { name: "frequency_penalty", label: "Frequency penalty", unit: 0.1 },
  { name: "presence_penalty", label: "Presence penalty", unit: 0.1 },
  { name: "repetition_penalty", label: "Repetition penalty", unit: 0.05, about: "1: none" },
  { name: "max_tokens", label: "Max tokens", unit: 1, fallback: USUAL_MAX_TOKENS },
  { name: "seed", label: "Seed", unit: 1, fallback: "random" },
  ...[
    { name: "typical_p", label: "Typical p", unit: 0.05, fallback: 1, about: "1: off" },
    { name: "top_n_sigma", label: "Top n sigma", unit: 0.1, fallback: 0, about: "0: off" },
    { name: "dynatemp_range", label: "Dynatemp range", unit: 0.1, fallback: 0, about: "0: off" },
    { name: "dynatemp_exponent", label: "Dynatemp exponent", unit: 0.1, fallback: 1 },
    { name: "xtc_probability", label: "XTC probability", unit: 0.05, fallback: 0, about: "0: off" },
    { name: "xtc_threshold", label: "XTC threshold", unit: 0.05, fallback: 0.1 },
    { name: "dry_multiplier", label: "DRY multiplier", unit: 0.1, fallback: 0, about: "0: off" },
    { name: "dry_base", label: "DRY base", unit: 0.05, fallback: 1.75 },
    { name: "dry_allowed_length", label: "DRY allowed length", unit: 1, fallback: 2 },
    {
      name: "dry_penalty_last_n",
      label: "DRY last tokens",
      unit: 1,
      fallback: -1,
      about: "-1: all",
    },
  ].map((field) => ({ ...field, isRare: true })),
];
export const STOP = { name: "stop", label: "Stop sequences" };

let schemas = {}; // name of a field -> its schema
let loading = null;

/** Fetch the bounds once. Without them the form accepts every number, and the server refuses it. */
export function loadFields() {
  loading ??= getJson("openapi.json")
    .then((document) => {
      schemas = resolve({ $ref: "#/components/schemas/ChatBody" }, document).properties ?? {};
    })
    .catch(() => {
      loading = null;
    });
  return loading;
}

/** Return the number that a text stands for: NaN if it is none; undefined if the text is "". */
export function numberOf(text) {
  return text?.trim() ? Number(text) : undefined;
}

/** Return the stop sequences that a text holds, one in each line. */
export function stopOf(text) {
  return (text ?? "").split("\n").filter(Boolean);
}

/** Return why the server would refuse a value, such as "must be a number from 0 to 2"; otherwise "". */
export function problemOf(name, value) {
  const choices = choicesOf(name);
  if (value === undefined || choices.some((schema) => accepts(value, schema))) return "";
  const isList = Array.isArray(value);
  return `must be ${inWords(choices.find(({ type }) => (type === "array") === isList))}`;
}

/** Return the schemas of a field's values. Before the bounds are known, any number or list is right. */
function choicesOf(name) {
  const schema = schemas[name] ?? { anyOf: [{ type: "number" }, { type: "array", items: {} }] };
  return (schema.anyOf ?? [schema]).filter(({ type }) => type !== "null");
}

function accepts(value, { type, items, ...bounds }) {
  if (type === "array")
    return (
      Array.isArray(value) &&
      value.length <= (bounds.maxItems ?? Infinity) &&
      value.every((text) => text.length <= (items.maxLength ?? Infinity))
    );
  // A whole number that a double cannot represent would be sent as another one.
  const isRight = type === "integer" ? Number.isSafeInteger : Number.isFinite;
  return (
    isRight(value) &&
    value >= (bounds.minimum ?? -Infinity) &&
    value <= (bounds.maximum ?? Infinity) &&
    value > (bounds.exclusiveMinimum ?? -Infinity)
  );
}

/** Return what a schema accepts: "a whole number from 1 to 16,777,216". */
function inWords({ type, items, maxItems, minimum, maximum, exclusiveMinimum }) {
  if (type === "array")
    return `at most ${shown(maxItems)} lines of at most ${shown(items.maxLength)} characters`;
  const [low, high] =
    type === "integer"
      ? [Math.max(minimum, Number.MIN_SAFE_INTEGER), Math.min(maximum, Number.MAX_SAFE_INTEGER)]
      : [minimum, maximum];
  const kind = type === "integer" ? "a whole number" : "a number";
  if (exclusiveMinimum !== undefined)
    return `${kind} above ${shown(exclusiveMinimum)}, at most ${shown(high)}`;
  return low === undefined ? kind : `${kind} from ${shown(low)} to ${shown(high)}`;
}

function shown(number) {
  return number.toLocaleString("en");
}
