// The panel of settings in the chat: presets and the form, and the line that says what is set.

import { errorBox } from "./api.js";
import { fill, h, icon, iconButton } from "./dom.js";
import {
  isUsual,
  MAX_NAME_CHARS,
  presetOf,
  presets,
  PRESETS_CHANGED,
  removePreset,
  renamePreset,
  savePreset,
} from "./presets.js";
import { describeSettings, SettingsForm } from "./settings.js";

const OWN = "own"; // the option for settings that are no preset

export class SettingsPanel {
  /** handlers: onChange(), onPreset(settings) if a preset was chosen, toggle(isOpen) */
  constructor(handlers, signal) {
    this.handlers = handlers;
    this.settings = {};
    this.form = new SettingsForm({}, () => {
      this.draw();
      handlers.onChange();
    });
    this.preset = h("select", { id: "preset", onchange: () => this.choose() });
    this.tools = h("div", { class: "preset-tools" });
    this.problem = h("div", {});
    this.changed = h("p", { class: "changed" });
    this.element = h(
      "aside",
      { id: "chat-settings", class: "side settings-side", "aria-label": "Settings" },
      h(
        "div",
        { class: "side-head" },
        h("h2", {}, "Settings"),
        iconButton("close", "Close the settings", () => handlers.toggle(false)),
      ),
      h("div", { class: "field" }, h("label", { for: "preset" }, "Preset"), this.preset),
      this.tools,
      this.problem,
      this.form.element,
    );
    addEventListener(PRESETS_CHANGED, () => this.draw(), { signal });
  }

  /** Show the settings of a conversation, with the defaults of its model, or null. */
  show(settings, model) {
    this.settings = settings;
    this.form.show(settings, model);
    this.draw();
  }

  draw() {
    const usual = isUsual(this.settings);
    const own = presetOf(this.settings);
    fill(
      this.preset,
      h("option", { value: "" }, "None: the defaults"),
      presets().map(({ id, name }) => h("option", { value: id }, name)),
      own || usual ? null : h("option", { value: OWN }, "Not saved"),
    );
    this.preset.value = own?.id ?? (usual ? "" : OWN);
    fill(
      this.tools,
      own || usual ? null : textButton("plus", "Save as a preset", () => this.ask(null)),
      own ? textButton("edit", "Rename", () => this.ask(own)) : null,
      own ? textButton("trash", "Delete", () => this.store(() => removePreset(own))) : null,
    );
    this.drawChanged(own);
  }

  /** Say which settings apply to the next message, as a new conversation has those of the last one. */
  drawChanged(preset) {
    const words = describeSettings(this.settings);
    const name = preset ? `preset “${preset.name}”: ` : "";
    fill(
      this.changed,
      ...(words.length
        ? [
            h("span", {}, `Settings: ${name}${words.join(", ")}`),
            textButton(null, "Change", () => this.handlers.toggle(true)),
            textButton(null, "Use the defaults", () => this.form.reset()),
          ]
        : []),
    );
  }

  choose() {
    const { value } = this.preset;
    if (value !== OWN)
      this.handlers.onPreset({ ...presets().find(({ id }) => id === value)?.settings });
    this.preset.focus();
  }

  /** Ask for the name of a preset: the one to rename, or null for the settings of now. */
  ask(own) {
    const input = h("input", {
      value: own?.name ?? "",
      maxlength: MAX_NAME_CHARS,
      placeholder: "Name",
      "aria-label": "Name of the preset",
      onkeydown: (event) => {
        if (event.key !== "Escape") return;
        event.stopPropagation();
        this.draw();
        this.preset.focus();
      },
    });
    const form = h(
      "form",
      { class: "preset-name" },
      input,
      h("button", { type: "submit", class: "button small primary" }, "Save"),
      textButton(null, "Cancel", () => this.draw()),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const name = input.value.trim();
      if (name) this.store(() => (own ? renamePreset(own, name) : savePreset(name, this.settings)));
    });
    fill(this.tools, form);
    input.focus();
    input.select();
  }

  /** Change the presets. Show why, if the browser does not keep them. */
  store(change) {
    fill(this.problem);
    try {
      change();
      this.preset.focus();
    } catch (error) {
      fill(this.problem, errorBox(error));
    }
  }
}

function textButton(picture, label, onclick) {
  return h(
    "button",
    { type: "button", class: "button small ghost", onclick },
    picture ? icon(picture) : null,
    label,
  );
}
