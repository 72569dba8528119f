// The menu of models in the chat. It shows their states, and follows them while they change.

import { KEY_CHANGED } from "./api.js";
import { h } from "./dom.js";
import { loadFields } from "./fields.js";
import { fetchModels, fillModelSelect, isSettled, knownModels, MODELS_FETCHED } from "./models.js";

const CHANGING_MS = 1000; // how often the models are fetched while one is loading
const SEVERAL_MS = 15_000; // and while one of several may be loaded or unloaded for another client

export class ModelMenu {
  /** handlers: onChoose(id), onModels() when the models have changed, onProblem(error or null) */
  constructor(handlers, signal) {
    this.handlers = handlers;
    this.signal = signal;
    this.problem = null; // why the models could not be fetched
    this.loading = null; // the fetch in progress
    this.hasFields = false; // whether the bounds of the settings are known
    this.shown = "";
    this.element = h("select", {
      class: "model",
      "aria-label": "Model",
      onchange: () => handlers.onChoose(this.element.value),
    });
    signal.addEventListener("abort", () => clearTimeout(this.timer));
    const on = (target, name, run) => target.addEventListener(name, run, { signal });
    on(window, KEY_CHANGED, () => this.load());
    on(window, MODELS_FETCHED, () => this.hasFields && this.update());
    on(document, "visibilitychange", () => document.hidden || this.load());
  }

  get value() {
    return this.element.value;
  }

  /** Show the known models, with one chosen. Return its id, or that of the first if it is unknown. */
  choose(id) {
    return fillModelSelect(this.element, knownModels(), id);
  }

  /** Fetch the models. While the server is not ready, or they change, do so again and again. */
  load() {
    this.loading = this.fetch().finally(() => (this.loading = null));
    return this.loading;
  }

  /** Wait for the models. If they could not be fetched, try again, which may ask for a key. */
  wait() {
    return this.loading ?? this.load();
  }

  async fetch() {
    clearTimeout(this.timer);
    let waitMs;
    try {
      const models = await fetchModels();
      await loadFields(); // not before: it may need the same key
      this.hasFields = true;
      this.update();
      waitMs = !models.every(isSettled) ? CHANGING_MS : models.length > 1 ? SEVERAL_MS : null;
    } catch (error) {
      this.problem = error;
      this.handlers.onProblem(error);
      waitMs = error.status === 503 ? 1000 * (error.retryAfterS ?? 1) : null;
    }
    if (waitMs === null || this.signal.aborted) return;
    this.timer = setTimeout(() => document.hidden || this.load(), waitMs); // or once it is visible
  }

  /** Show what was fetched, by whichever part of the page. */
  update() {
    this.problem = null;
    this.handlers.onProblem(null);
    const models = JSON.stringify(knownModels());
    if (models !== this.shown || !this.value) this.handlers.onModels();
    else this.choose(this.value); // the time that a model has been loading
    this.shown = models;
  }
}
