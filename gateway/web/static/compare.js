// The compare tab: one prompt and one seed, two models or two settings, answered at the same time.

import {
  describeEnd,
  describeFirstToken,
  inWords,
  LOADING,
  newAnswer,
  streamAnswer,
  WITH_LOADING,
} from "./answer.js";
import { errorBox, KEY_CHANGED } from "./api.js";
import { commonLength, countWords, diff, MAX_EDITS, partsOf } from "./diff.js";
import { fill, h, icon, loadStyle, oncePerFrame } from "./dom.js";
import { loadFields, NUMBERS } from "./fields.js";
import { fetchModels, fillModelSelect, knownModels } from "./models.js";
import { chatBody, streamed } from "./requests.js";
import { numberInput, SettingsForm } from "./settings.js";

const STORED = "tidegate.compare";
const SHARED = ["seed", "max_tokens", "logprobs", "tools"];
const NAMES = ["A", "B"];
const MAX_SEED = 2 ** 31;
const MAX_EDITS_SO_FAR = 100; // while answers grow, they are compared in each frame

export async function mount(root, context) {
  await Promise.all([loadStyle("chat.css"), loadStyle("compare.css")]);
  const compare = new CompareTab(root, context);
  await compare.loadModels();
  return () => compare.close();
}

class CompareTab {
  constructor(root, context) {
    this.context = context;
    this.abort = new AbortController(); // ends all listeners
    this.run = null; // AbortController of the answers in progress
    this.values = read();
    this.draw = oncePerFrame(() => this.drawResults());
    this.sides = NAMES.map((name, place) => this.side(name, this.values.sides[place]));
    this.build(root);
    addEventListener(KEY_CHANGED, () => this.loadModels(), { signal: this.abort.signal });
    root.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.run?.abort();
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        if (!this.run) this.form.requestSubmit();
      }
    });
  }

  build(root) {
    const { values } = this;
    this.prompt = h("textarea", {
      id: "compare-prompt",
      rows: 2,
      placeholder: "The message that both answer",
      value: values.prompt,
    });
    this.fields = [
      numberField("seed", "compare-seed", values.seed),
      numberField("max_tokens", "compare-max", values.maxTokens),
    ];
    [this.seed, this.maxTokens] = this.fields.map(({ input }) => input);
    this.button = h("button", { type: "submit", class: "button primary" });
    this.problem = h("div", {});
    this.verdict = h("p", { class: "verdict" });
    this.table = h("table", { class: "plain facts-table" });
    const dice = h(
      "button",
      { type: "button", class: "button", onclick: () => this.drawSeed() },
      "New seed",
    );
    this.form = h(
      "form",
      { class: "card question" },
      h("div", { class: "field" }, h("label", { for: "compare-prompt" }, "Prompt"), this.prompt),
      h(
        "div",
        { class: "row" },
        h(
          "div",
          { class: "field inline" },
          h("label", { for: "compare-seed" }, "Seed"),
          this.seed,
        ),
        dice,
        h(
          "div",
          { class: "field inline" },
          h("label", { for: "compare-max" }, "Max tokens"),
          this.maxTokens,
        ),
        h("span", { class: "grow" }),
        h(
          "p",
          { class: "muted keys" },
          [h("kbd", {}, "Ctrl"), " + ", h("kbd", {}, "Enter"), " compares"],
        ),
        this.button,
      ),
    );
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.run) this.run.abort();
      else this.start();
    });
    this.prompt.addEventListener("keydown", (event) => {
      const hasModifier = event.shiftKey || event.ctrlKey || event.metaKey;
      if (event.key === "Enter" && !hasModifier && !event.isComposing) {
        event.preventDefault();
        if (!this.run) this.form.requestSubmit();
      }
    });
    fill(
      root,
      h(
        "div",
        { class: "page" },
        h("h1", {}, "Compare"),
        h(
          "p",
          { class: "muted" },
          "One prompt and one seed, answered by two models, or with two settings, at the same time.",
        ),
        this.form,
        this.problem,
        h(
          "div",
          { class: "sides" },
          this.sides.map(({ element }) => element),
        ),
        this.verdict,
        h("div", { class: "scrolls" }, this.table),
      ),
    );
    this.drawButton();
  }

  side(name, values) {
    const model = h("select", { "aria-label": `Model of ${name}` });
    const form = new SettingsForm(values.settings, () => this.onSettings(), { without: SHARED });
    const output = h("div", {
      class: "output",
      role: "region",
      "aria-label": `Answer of ${name}`,
      tabindex: 0,
    });
    const side = { name, values, model, form, output, answer: null };
    model.addEventListener("change", () => {
      values.model = model.value;
      this.showModel(side);
      this.onSettings();
    });
    side.element = h(
      "section",
      { class: "card compared", "aria-label": name },
      h("div", { class: "row head" }, h("h2", {}, name), model),
      h("details", {}, h("summary", {}, "Settings"), form.element),
      output,
    );
    return side;
  }

  async loadModels() {
    try {
      const models = await fetchModels();
      await loadFields(); // not before: it may need the same key
      for (const { check } of this.fields) check();
      fill(this.problem);
      this.sides.forEach((side, place) => {
        side.values.model = fillModelSelect(
          side.model,
          models,
          side.values.model || models[place]?.id,
        );
        this.showModel(side);
      });
      this.drawTable();
    } catch (error) {
      fill(this.problem, errorBox(error));
    }
  }

  showModel({ form, values }) {
    form.show(values.settings, knownModels().find(({ id }) => id === values.model) ?? null);
  }

  onSettings() {
    write(this.values);
    this.drawTable();
  }

  async start() {
    const { values } = this;
    const [prompt, seed, maxTokens] = [this.prompt, this.seed, this.maxTokens].map(
      ({ value }) => value,
    );
    Object.assign(values, { prompt, seed, maxTokens });
    write(values);
    fill(this.problem);
    if (!prompt.trim()) return this.prompt.focus();
    const isReady = () => this.sides.every((side) => side.values.model);
    if (!isReady()) await this.loadModels(); // it may ask for a key
    if (!isReady()) return undefined; // its error is shown
    let bodies;
    try {
      const messages = [{ role: "user", content: prompt }];
      bodies = this.sides.map(({ values: own }) => ({
        ...streamed(
          chatBody(own.model, messages, { ...own.settings, seed, max_tokens: maxTokens }),
        ),
        return_token_ids: true,
      }));
    } catch (error) {
      return fill(this.problem, errorBox(error));
    }
    this.run = new AbortController();
    this.drawButton();
    this.context.announce("Answering.");
    const { signal } = this.run;
    await Promise.all(
      this.sides.map((side, place) => {
        side.answer = newAnswer(side.values.model, side.values.settings);
        return streamAnswer(side.answer, bodies[place], signal, this.draw);
      }),
    );
    this.run = null;
    this.drawButton();
    this.drawResults();
    // Others may have been unloaded for a model.
    if (this.sides.some(({ answer }) => answer.hasLoaded)) await this.loadModels();
    return this.context.announce(this.verdict.textContent);
  }

  close() {
    this.run?.abort();
    this.abort.abort();
  }

  drawSeed() {
    this.seed.value = newSeed();
    this.seed.dispatchEvent(new Event("input"));
  }

  // ---- results

  drawButton() {
    const isRunning = this.run !== null;
    fill(this.button, icon(isRunning ? "stop" : "compare"), isRunning ? "Stop" : "Compare");
  }

  drawResults() {
    const answers = this.sides.map(({ answer }) => answer);
    if (answers.includes(null)) return;
    const texts = answers.map(textOf);
    const parts = texts.map(partsOf);
    const runs = diff(...parts, this.run ? MAX_EDITS_SO_FAR : MAX_EDITS);
    // While answers grow, the longer one has an end that the other may get.
    if (this.run && runs.length && !(runs.at(-1)[1] && runs.at(-1)[2])) runs.at(-1)[0] = true;
    const shown = parts.map((own, place) => marked(own, runs, place));
    this.sides.forEach(({ output, answer }, place) => {
      fill(
        output,
        shown[place].map(([text, isSame]) =>
          isSame ? text : h("mark", { class: "differs" }, text),
        ),
        answer.error ? errorBox(answer.error) : null,
        answer.isLoading ? h("p", { class: "note" }, LOADING) : null,
        describeEnd(answer) ? h("p", { class: "note" }, describeEnd(answer)) : null,
      );
    });
    const differ = runs.some(([isSame]) => !isSame);
    const common = commonLength(texts[0], texts[1]);
    this.verdict.textContent = this.describe(answers, common, differ && wordsThatDiffer(shown));
    this.drawTable();
  }

  /** `differ`: how much differs, in words; false: nothing does. */
  describe(answers, common, differ) {
    if (answers.some(({ error }) => error)) return "";
    if (!differ) return this.run ? "" : "The answers are identical.";
    const [first, second] = answers.map(({ tokenIds }) => tokenIds ?? []);
    const isSameModel = this.sides[0].values.model === this.sides[1].values.model;
    const token = isSameModel ? ` (token ${commonLength(first, second) + 1})` : "";
    return `The answers differ from character ${common + 1}${token} on: ${differ}.`;
  }

  drawTable() {
    const [a, b] = this.sides;
    const settings = differences(a.values, b.values);
    const read = (answer, figure) => (answer ? figure(answer) : "–");
    const rows = FIGURES.map(([name, figure]) => [name, read(a.answer, figure), read(b.answer, figure)]);
    const head = h(
      "thead",
      {},
      h("tr", {}, h("td"), h("th", { scope: "col" }, "A"), h("th", { scope: "col" }, "B")),
    );
    const rowOf = ([name, left, right]) =>
      h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, left), h("td", {}, right));
    const same = h(
      "tr",
      {},
      h("td", { class: "muted", colspan: 3 }, "Both sides have the same model and settings."),
    );
    const body = [...(settings.length ? settings.map(rowOf) : [same]), ...rows.map(rowOf)];
    fill(this.table, head, h("tbody", {}, body));
  }
}

const speedOf = ({ timings }) =>
  timings?.predicted_per_second ? `${timings.predicted_per_second.toFixed(1)} tokens/s` : "–";
const FIGURES = [
  ["Tokens", ({ tokens }) => String(tokens)],
  ["Speed", speedOf],
  ["First token", (answer) => describeFirstToken(answer) || "–"],
  ["Whole answer", (answer) => describeWhole(answer) || "–"],
  ["Prompt tokens", ({ usage }) => (usage ? String(usage.prompt_tokens) : "–")],
  ["End", ({ finish, error }) => (error ? "error" : (finish ?? "–"))],
];

/** Return the time until the end, and whether the model was loaded in it; "" if there is none. */
function describeWhole({ timings, tookMs, hasLoaded }) {
  const ms = timings?.total_ms ?? tookMs ?? null;
  return ms === null ? "" : `${inWords(ms)}${hasLoaded ? WITH_LOADING : ""}`;
}

/** Return the text of one side in pieces [text, isSame]: 0 for a, 1 for b. */
function marked(parts, runs, place) {
  let at = 0;
  return runs
    .map(([isSame, ...lengths]) => {
      const start = at;
      at += lengths[place];
      return [parts.slice(start, at).join(""), isSame];
    })
    .filter(([text]) => text);
}

/** Return how many words of each side the other has not: "1 of 2 words of A, 3 of 4 of B". */
function wordsThatDiffer(shown) {
  const count = (pieces) => countWords(pieces.flatMap(([text]) => partsOf(text)));
  const [a, b] = shown.map((pieces) => {
    const number = count(pieces.filter(([, isSame]) => !isSame));
    return `${number.toLocaleString("en")} of ${count(pieces).toLocaleString("en")}`;
  });
  return `${a} words of A, ${b} of B`;
}

/** Return the rows [name, left, right] of the model and the settings that differ. */
export function differences(a, b) {
  const rows = a.model === b.model ? [] : [["Model", a.model, b.model]];
  for (const name of new Set([...Object.keys(a.settings), ...Object.keys(b.settings)])) {
    const values = [a, b].map(({ settings }) => settings[name] ?? "default");
    if (values[0] !== values[1]) rows.push([name, ...values.map(String)]);
  }
  return rows;
}

function textOf({ reasoning, content, calls }) {
  const called = calls.map(({ name, args }) => `${name}(${args})`).join("\n");
  const answer = [content, called].filter(Boolean).join("\n");
  return reasoning ? `Reasoning:\n${reasoning.trim()}\n\nAnswer:\n${answer}` : answer;
}

/** Return the field of a number that both sides share. `start` refuses what it does not accept. */
function numberField(name, id, value) {
  const field = NUMBERS.find((each) => each.name === name);
  const made = numberInput(field, { value, onChange: () => {} });
  made.input.id = id;
  return made;
}

// ---- what the tab remembers

function newSeed() {
  return String(Math.floor(Math.random() * MAX_SEED));
}

function read() {
  const usual = {
    prompt: "",
    seed: newSeed(),
    maxTokens: "200",
    sides: NAMES.map(() => ({ model: "", settings: {} })),
  };
  try {
    return { ...usual, ...JSON.parse(localStorage.getItem(STORED) ?? "{}") };
  } catch {
    return usual;
  }
}

function write(values) {
  try {
    localStorage.setItem(STORED, JSON.stringify(values));
  } catch {
    // Storage is disabled or full: the values last until the page is loaded again.
  }
}
