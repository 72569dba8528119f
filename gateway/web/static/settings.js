// The form of the settings of a chat. An empty field means the model's default, which it shows.

import { fill, h } from "./dom.js";
import { parseExtra, parseTools } from "./requests.js";

const NUMBERS = [
  {
    name: "temperature",
    label: "Temperature",
    min: 0,
    max: 2,
    step: 0.1,
    about: "0: always the most likely token",
  },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: 0.05 },
  { name: "top_k", label: "Top k", min: 0, step: 1, about: "0: no limit" },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01 },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1 },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1 },
  {
    name: "repetition_penalty",
    label: "Repetition penalty",
    min: 0.01,
    step: 0.05,
    about: "1: none",
  },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1, fallback: "as many as fit" },
  { name: "seed", label: "Seed", min: 0, step: 1, fallback: "random" },
];
const EFFORTS = [
  ["", "Default"],
  ["none", "None"],
  ["low", "Low"],
  ["medium", "Medium"],
  ["high", "High"],
];
const EXAMPLE_TOOLS = [
  {
    type: "function",
    function: {
      name: "weather",
      description: "Return the weather in a city.",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];
let numForms = 0;

export class SettingsForm {
  /**
   * settings   the object that the form shows and changes
   * onChange   called after each change
   * options    without: names of fields to leave out
   */
  constructor(settings, onChange, { without = [] } = {}) {
    this.prefix = `settings-${++numForms}`;
    this.onChange = onChange;
    this.without = new Set(without);
    this.element = h("form", { class: "settings", onsubmit: (event) => event.preventDefault() });
    this.show(settings, null);
  }

  /** Show other settings, with the defaults of a model: an entry of GET /v1/models, or null. */
  show(settings, model) {
    this.settings = settings;
    this.model = model;
    const reasons = model?.formats === undefined || model.formats.reasoning !== null;
    const numbers = NUMBERS.filter(({ name }) => !this.without.has(name));
    fill(
      this.element,
      this.area("system", "System message", { rows: 3 }),
      h(
        "div",
        { class: "numbers" },
        numbers.map((field) => this.number(field)),
      ),
      reasons ? this.effort() : null,
      this.area("stop", "Stop sequences, one per line", { rows: 1 }),
      this.without.has("logprobs")
        ? null
        : this.check("logprobs", "Show the probability of each token"),
      this.without.has("tools") ? null : this.tools(),
      h(
        "details",
        { open: Boolean(settings.extra) },
        h("summary", {}, "Other fields"),
        this.area("extra", "A JSON object that is added to the request", {
          rows: 3,
          parse: parseExtra,
          mono: true,
        }),
      ),
      h(
        "button",
        { type: "button", class: "button small ghost", onclick: () => this.reset() },
        "Use the defaults",
      ),
    );
  }

  reset() {
    for (const name of Object.keys(this.settings))
      if (!this.without.has(name)) delete this.settings[name];
    this.show(this.settings, this.model);
    this.onChange();
  }

  set(name, value) {
    if (value === "" || value === false) delete this.settings[name];
    else this.settings[name] = value;
    this.onChange();
  }

  field(name, label, input, ...more) {
    input.id = `${this.prefix}-${name}`;
    input.name = name;
    return h("div", { class: "field" }, h("label", { for: input.id }, label), input, more);
  }

  number({ name, label, min, max, step, about, fallback = "" }) {
    const usual = this.model?.default_sampling?.[name];
    const placeholder = usual === undefined ? fallback : String(usual);
    const input = h("input", {
      type: "number",
      min,
      max,
      step: step === 1 ? 1 : "any",
      placeholder,
      title: about ?? null,
      inputmode: "decimal",
      value: this.settings[name] ?? "",
      oninput: () => {
        const isWrong = !input.validity.valid;
        input.setAttribute("aria-invalid", String(isWrong));
        if (!isWrong) this.set(name, input.value);
      },
      onkeydown: (event) => step && stepOnArrow(event, input, step, usual),
    });
    return this.field(name, label, input);
  }

  area(name, label, { rows, parse, mono }) {
    const error = h("p", { class: "error", role: "alert" });
    const input = h("textarea", {
      rows,
      class: mono ? "mono" : null,
      spellcheck: mono ? "false" : null,
      value: this.settings[name] ?? "",
    });
    input.addEventListener("input", () => this.set(name, input.value));
    input.addEventListener("change", () => {
      error.textContent = parse ? problemOf(() => parse(input.value)) : "";
      input.setAttribute("aria-invalid", String(Boolean(error.textContent)));
    });
    return this.field(name, label, input, parse ? error : null);
  }

  effort() {
    const options = EFFORTS.map(([value, label]) => h("option", { value }, label));
    const select = h(
      "select",
      { onchange: () => this.set("reasoning_effort", select.value) },
      options,
    );
    select.value = this.settings.reasoning_effort ?? "";
    return this.field("reasoning_effort", "Reasoning effort", select);
  }

  check(name, label) {
    const input = h("input", {
      type: "checkbox",
      checked: Boolean(this.settings[name]),
      onchange: () => this.set(name, input.checked),
    });
    return h("label", { class: "check" }, input, label);
  }

  tools() {
    const example = h(
      "button",
      {
        type: "button",
        class: "button small ghost",
        onclick: () => {
          this.set("tools", JSON.stringify(EXAMPLE_TOOLS, null, 2));
          this.show(this.settings, this.model);
        },
      },
      "Insert an example",
    );
    return h(
      "details",
      { open: Boolean(this.settings.tools) },
      h("summary", {}, "Tools"),
      this.area("tools", "Definitions of functions, as a JSON list", {
        rows: 6,
        parse: parseTools,
        mono: true,
      }),
      example,
    );
  }
}

/** Change a number field by its own step, beginning at the default. The browser would begin at 0. */
function stepOnArrow(event, input, step, usual) {
  const direction = { ArrowUp: 1, ArrowDown: -1 }[event.key];
  if (!direction) return;
  event.preventDefault();
  const from = input.value === "" ? Number(usual ?? 0) : Number(input.value);
  const next = Number((from + direction * step).toFixed(4));
  const min = input.min === "" ? -Infinity : Number(input.min);
  const max = input.max === "" ? Infinity : Number(input.max);
  input.value = String(Math.min(max, Math.max(min, next)));
  input.dispatchEvent(new Event("input"));
}

function problemOf(check) {
  try {
    check();
    return "";
  } catch (error) {
    return error.message;
  }
}
