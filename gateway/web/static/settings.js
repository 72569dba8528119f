// The form of the settings of a chat. An empty field means the model's default, which it shows.

import { fill, h } from "./dom.js";
import { NUMBERS, numberOf, problemOf, STOP, stopOf } from "./fields.js";
import { parseExtra, parseTools } from "./requests.js";

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

  /**
   * Show settings, with the defaults of a model: an entry of GET /v1/models, or null. If they are
   * those shown before, the user may be typing: the defaults arrive later than the form.
   */
  show(settings, model) {
    const restore = settings === this.settings ? remember(this.element) : () => {};
    this.settings = settings;
    this.model = model;
    const reasons = model?.formats === undefined || model.formats.reasoning !== null;
    fill(
      this.element,
      this.area("system", "System message", { rows: 3 }),
      this.numbers(({ isRare }) => !isRare),
      h(
        "details",
        { open: NUMBERS.some(({ name, isRare }) => isRare && settings[name]) },
        h("summary", {}, "More samplers"),
        this.numbers(({ isRare }) => isRare),
      ),
      reasons ? this.effort() : null,
      this.area(STOP.name, `${STOP.label}, one per line`, {
        rows: 1,
        problem: (text) => problemOf(STOP.name, stopOf(text)),
      }),
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
          problem: raised(parseExtra),
          mono: true,
        }),
      ),
      h(
        "button",
        { type: "button", class: "button small ghost", onclick: () => this.reset() },
        "Use the defaults",
      ),
    );
    restore();
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

  field(name, label, input, error = null) {
    input.id = `${this.prefix}-${name}`;
    input.name = name;
    if (error) {
      error.id = `${input.id}-error`;
      input.setAttribute("aria-describedby", error.id);
    }
    return h("div", { class: "field" }, h("label", { for: input.id }, label), input, error);
  }

  /** Return the fields of those numbers that `isWanted` selects. */
  numbers(isWanted) {
    const fields = NUMBERS.filter((field) => isWanted(field) && !this.without.has(field.name));
    return h(
      "div",
      { class: "numbers" },
      fields.map((field) => this.number(field)),
    );
  }

  number(field) {
    const usual = this.model?.default_sampling?.[field.name];
    const { input, error } = numberInput(field, {
      usual,
      value: this.settings[field.name],
      onChange: (text) => this.set(field.name, text),
    });
    return this.field(field.name, field.label, input, error);
  }

  area(name, label, { rows, problem = () => "", mono }) {
    const error = h("p", { class: "error", role: "alert" });
    const input = h("textarea", {
      rows,
      class: mono ? "mono" : null,
      spellcheck: mono ? "false" : null,
      value: this.settings[name] ?? "",
    });
    input.addEventListener("input", () => this.set(name, input.value));
    input.addEventListener("change", () => mark(input, error, problem(input.value)));
    return this.field(name, label, input, error);
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
        problem: raised(parseTools),
        mono: true,
      }),
      example,
    );
  }
}

/** Return a function that gives the form's fields, made anew, the focus and the open parts of now. */
function remember(form) {
  const { activeElement } = document;
  const { name, selectionStart, selectionEnd } = form.contains(activeElement) ? activeElement : {};
  const open = [...form.querySelectorAll("details")].map((part) => part.open);
  return () => {
    form.querySelectorAll("details").forEach((part, place) => (part.open = open[place]));
    const field = name ? form.elements[name] : null;
    field?.focus();
    if (typeof selectionStart === "number") field?.setSelectionRange(selectionStart, selectionEnd);
  };
}

/** Return the settings that differ from the defaults, in words: ["temperature 0.5", "tools"]. */
export function describeSettings(settings) {
  const named = (label, value) => `${label.toLowerCase()} ${value.trim()}`;
  return [
    ...(settings.system?.trim() ? ["system message"] : []),
    ...NUMBERS.filter(({ name }) => settings[name]?.trim()).map(({ name, label }) =>
      named(label, settings[name]),
    ),
    ...(settings.reasoning_effort ? [named("Reasoning effort", settings.reasoning_effort)] : []),
    ...(stopOf(settings.stop).length ? ["stop sequences"] : []),
    ...(settings.logprobs ? ["probabilities"] : []),
    ...(settings.tools?.trim() ? ["tools"] : []),
    ...(settings.extra?.trim() ? ["other fields"] : []),
  ];
}

/**
 * Return a field for a number and the element of its error. What was typed is kept even if the server
 * would refuse it, so that it is not lost without a word.
 *
 * field    an entry of NUMBERS
 * options  value (text), usual (the model's default), onChange(text)
 *
 * The result's `check` marks the field again, after its bounds are known.
 */
export function numberInput({ name, unit, about, fallback = "" }, { value, usual, onChange }) {
  const error = h("p", { class: "error", role: "alert" });
  const input = h("input", {
    inputmode: "decimal",
    autocomplete: "off",
    placeholder: String(usual ?? fallback),
    title: about ?? null,
    value: value ?? "",
    oninput: () => {
      check();
      onChange(input.value);
    },
    onkeydown: (event) => stepOnArrow(event, input, { name, unit, usual: usual ?? fallback }),
  });
  const check = () => mark(input, error, problemOf(name, numberOf(input.value)));
  check();
  return { input, error, check };
}

/** Change a number by its own unit, beginning at the default, as far as the bounds allow. */
function stepOnArrow(event, input, { name, unit, usual }) {
  const direction = { ArrowUp: 1, ArrowDown: -1 }[event.key];
  if (!direction) return;
  event.preventDefault();
  const from = numberOf(input.value) ?? (Number(usual) || 0);
  const next = Number((from + direction * unit).toFixed(4));
  if (problemOf(name, next)) return;
  input.value = String(next);
  input.dispatchEvent(new Event("input"));
}

/** Show what is wrong with a field; "": nothing. */
function mark(input, error, problem) {
  error.textContent = problem && `${problem[0].toUpperCase()}${problem.slice(1)}`;
  input.setAttribute("aria-invalid", String(Boolean(problem)));
}

/** Return a function that returns the message that `check` raises; "" if it raises none. */
function raised(check) {
  return (text) => {
    try {
      check(text);
      return "";
    } catch (error) {
      return error.message;
    }
  };
}
