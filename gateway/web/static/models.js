// The served models, from GET /v1/models.

import { getJson } from "./api.js";
import { fill, h } from "./dom.js";

const STATES = {
  loading: "loading",
  failed: "failed",
  unloaded: "asleep, loads on use",
  waiting: "waiting for memory",
  stopping: "stopping",
};

/** Names of the events after the models were fetched, and after the user has chosen one. */
export const MODELS_FETCHED = "tidegate-models-fetched";
export const MODEL_CHOSEN = "tidegate-model-chosen";

let last = [];
let chosen = "";
const loadingSince = new Map(); // id -> when the page first saw that the model is loading, in ms

/** Fetch the models. Raises ApiError. */
export async function fetchModels() {
  last = (await getJson("v1/models")).data;
  for (const { id, state } of last) {
    if (state !== "loading") loadingSince.delete(id);
    else if (!loadingSince.has(id)) loadingSince.set(id, Date.now());
  }
  dispatchEvent(new Event(MODELS_FETCHED));
  return last;
}

/** Choose the model of the next conversation, for whichever part of the page shows it. */
export function chooseModel(id) {
  chosen = id;
  dispatchEvent(new Event(MODEL_CHOSEN));
}

/** Return the model that was chosen since the last call; "" if none was. */
export function takeChosenModel() {
  const taken = chosen;
  chosen = "";
  return taken;
}

/** Return the models as they were last fetched. */
export function knownModels() {
  return last;
}

/** Return whether a model has to be loaded before it answers, as far as is known. */
export function isAsleep(id) {
  return stateOf(last.find((model) => model.id === id)) !== "";
}

/** Return whether a model stays in its state until someone needs it. */
export function isSettled({ state }) {
  return ["ready", "unloaded", "failed"].includes(state);
}

/** Return what a model does if it is not ready, such as "loading"; "" if it is ready. */
export function stateOf(model) {
  return model && model.state !== "ready" ? (STATES[model.state] ?? model.state) : "";
}

/** Return for how long the page has seen a model loading: "3 s"; "" if it is not. */
export function loadingTime(id) {
  const since = loadingSince.get(id);
  return since === undefined ? "" : `${Math.round((Date.now() - since) / 1000)} s`;
}

/** Fill a <select> with the models. Return the choice: `chosen`, or the first if it is unknown. */
export function fillModelSelect(select, models, chosen) {
  const id = models.some((model) => model.id === chosen) ? chosen : (models[0]?.id ?? "");
  const label = (model) => {
    const state = [stateOf(model), loadingTime(model.id)].filter(Boolean).join(", ");
    return state ? `${model.id} (${state})` : model.id;
  };
  const options = [...select.options];
  // New options would close the menu if it is open.
  if (options.map(({ value }) => value).join("\n") === models.map((each) => each.id).join("\n"))
    options.forEach((option, place) => (option.textContent = label(models[place])));
  else
    fill(
      select,
      models.map((model) => h("option", { value: model.id }, label(model))),
    );
  select.value = id;
  return id;
}
