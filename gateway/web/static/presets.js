// Presets: named sets of settings, with their system message. They are kept in localStorage, and in
// exports beside the conversations. It draws nothing.
//
// A conversation does not remember its preset: a preset is in use if the settings are the same.

import { newId } from "./answer.js";

const STORED = "tidegate.presets";
export const MAX_NAME_CHARS = 60;
export const PRESETS_CHANGED = "tidegate-presets-changed";

/** Return the presets by name: [{ id, name, settings }]. */
export function presets() {
  try {
    return JSON.parse(localStorage.getItem(STORED)) ?? [];
  } catch {
    return [];
  }
}

/** Return whether settings are the defaults. */
export function isUsual(settings) {
  return !Object.values(settings).some(Boolean);
}

/** Return the preset that has these settings; undefined if none has, or if they are the defaults. */
export function presetOf(settings) {
  if (isUsual(settings)) return undefined;
  const own = comparable(settings);
  return presets().find((preset) => comparable(preset.settings) === own);
}

/** Keep settings under a name. A preset of this name is replaced. Raises Error if there is no room. */
export function savePreset(name, settings) {
  const others = presets().filter((preset) => preset.name !== name);
  const { id } = presets().find((preset) => preset.name === name) ?? { id: newId() };
  store([...others, { id, name, settings: { ...settings } }]);
}

/** Give a preset another name. A preset that has this name already is replaced. */
export function renamePreset({ id }, name) {
  const others = presets().filter((preset) => preset.id === id || preset.name !== name);
  store(others.map((preset) => (preset.id === id ? { ...preset, name } : preset)));
}

export function removePreset({ id }) {
  store(presets().filter((preset) => preset.id !== id));
}

/** Add presets of a file, except those whose id or name is here already. Return their number. */
export function addPresets(found) {
  const own = presets();
  const added = found.filter(({ id, name }) =>
    own.every((preset) => preset.id !== id && preset.name !== name),
  );
  if (added.length) store([...own, ...added]);
  return added.length;
}

function store(all) {
  const sorted = all.sort((a, b) => a.name.localeCompare(b.name));
  try {
    localStorage.setItem(STORED, JSON.stringify(sorted));
  } catch (error) {
    throw new Error("The browser does not keep presets: its storage is disabled or full.", {
      cause: error,
    });
  }
  dispatchEvent(new Event(PRESETS_CHANGED));
}

/** Return settings as a text that is the same for the same settings. */
function comparable(settings) {
  return JSON.stringify(Object.entries(settings).sort(([a], [b]) => (a < b ? -1 : 1)));
}
