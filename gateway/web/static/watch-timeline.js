// Shows where the time of one request went: in words, and as bars over time.

import { errorBox, getJson } from "./api.js";
import { fill, h, iconButton } from "./dom.js";
import { count, duration, STAGES } from "./watch-words.js";

/** The panel below the charts. It follows the request while it is open. */
export class TimelinePanel {
  /** `close` is called when the user closes the panel. */
  constructor(close) {
    this.name = "";
    this.isEnded = false;
    this.fetching = null; // AbortController
    this.title = h("h3", {});
    this.content = h("div", {});
    const head = h("div", { class: "row watch-panel-head" }, this.title, iconButton("close", "Close the timeline", close));
    this.root = h("div", { class: "card watch-panel", role: "region", "aria-label": "Timeline", hidden: true }, head, this.content);
  }

  /** Show the timeline of a request; "": hide the panel. */
  show(name) {
    this.pause();
    if (name === this.name && name) return this.load();
    this.name = name;
    this.isEnded = false;
    this.root.hidden = !name;
    if (!name) return undefined;
    this.title.textContent = name;
    fill(this.content, h("p", { class: "muted" }, "Loading …"));
    return this.load().then(() => this.root.scrollIntoView({ block: "nearest" }));
  }

  /** Load the timeline again, if the request was open. Called for each frame of the stream. */
  onFrame() {
    if (this.name && !this.isEnded && !this.fetching) this.load();
  }

  pause() {
    this.fetching?.abort();
    this.fetching = null;
  }

  close() {
    this.pause();
    this.name = "";
  }

  async load() {
    const { name } = this;
    const own = (this.fetching = new AbortController());
    try {
      const path = name.split("/").map(encodeURIComponent).join("/");
      const found = await getJson(`v1/requests/${path}/timeline`, { signal: own.signal });
      if (this.fetching !== own) return;
      this.isEnded = found.choices.every((choice) => choice.timeline.finish);
      const isOpen = [...this.content.querySelectorAll("details")].map((each) => each.open);
      fill(this.content, h("p", { class: "watch-headline" }, found.headline), found.choices.map((choice, place) => choiceView(choice, found, place)));
      [...this.content.querySelectorAll("details")].forEach((each, place) => (each.open = isOpen[place] ?? false));
    } catch (error) {
      if (own.signal.aborted) return;
      this.isEnded = true;
      fill(this.content, errorBox(error));
    } finally {
      if (this.fetching === own) this.fetching = null;
    }
  }
}

function choiceView(choice, found, place) {
  const { timeline } = choice;
  const facts = [
    timeline.finish ? `${choice.ended}, ${duration(timeline.ended_ago_s ?? 0)} ago` : choice.ended,
    `${count(timeline.prompt_tokens)} + ${count(timeline.generated_tokens ?? 0)} tokens`,
    timeline.account ? `account ${timeline.account}` : "",
    choice.role ? `${choice.role} ${choice.engine}` : "",
  ];
  const several = found.choices.length > 1 ? h("h4", {}, `Choice or engine ${place + 1}`) : null;
  return h(
    "section",
    { class: "watch-choice" },
    several,
    h("p", { class: "muted" }, facts.filter(Boolean).join(" · ")),
    reasons(choice.explanation),
    gantt(timeline),
    found.gateway_note ? h("p", { class: "muted" }, `Times in the gateway are missing: ${found.gateway_note}.`) : null,
    h("details", {}, h("summary", {}, "Stages and steps as a table"), stageTable(timeline), stepTable(timeline)),
  );
}

/** The sentences, each with a bar of its share of the time. */
function reasons(explanation) {
  if (!explanation.length) return h("p", {}, "It took too little time to explain.");
  const longest = Math.max(...explanation.map((reason) => reason.seconds), 1e-9);
  const items = explanation.map((reason) => {
    const bar = h("i", { class: `cause ${reason.cause}`, "aria-hidden": "true" });
    bar.style.width = `${(100 * reason.seconds) / longest}%`;
    const time = reason.seconds ? duration(reason.seconds) : "";
    return h("li", {}, h("span", { class: "time" }, time), h("span", { class: "share" }, bar), h("span", {}, reason.text));
  });
  return h("ol", { class: "watch-reasons" }, items);
}

// ---- bars over time

const KINDS = [
  ["own-prefill", "its prompt"],
  ["own-decode", "its answer"],
  ["own-decode mixed", "its answer, with prompts of others"],
  ["other-prefill", "prompts of others"],
  ["other-decode", "answers of others"],
];

function gantt(timeline) {
  const total = Math.max(timeline.took_s, 1e-9);
  const stages = (timeline.stages ?? []).map((span) =>
    segment(span.start_s, span.end_s, total, `stage-${span.stage}`, `${STAGES[span.stage]}: ${duration(span.end_s - span.start_s)}`),
  );
  const steps = (timeline.groups ?? []).map((group) => segment(group.start_s, group.end_s, total, kindOf(group), stepText(group)));
  const used = new Set((timeline.groups ?? []).map(kindOf));
  const names = [...new Set((timeline.stages ?? []).map((span) => span.stage))].map((stage) => [`stage-${stage}`, STAGES[stage]]);
  return h(
    "div",
    { class: "watch-gantt" },
    h("span", { class: "label" }, "Stages"),
    h("div", { class: "lane", role: "img", "aria-label": (timeline.stages ?? []).map((span) => `${STAGES[span.stage]} for ${duration(span.end_s - span.start_s)}`).join(", ") }, stages),
    h("span", { class: "label" }, "Steps"),
    h("div", { class: "lane", role: "img", "aria-label": "What the engine's steps computed meanwhile; the table below has the numbers" }, steps),
    h("span", { class: "axis" }, h("span", {}, "0"), h("span", {}, duration(total / 2)), h("span", {}, duration(total))),
    h("ul", { class: "watch-legend" }, [...names, ...KINDS.filter(([kind]) => used.has(kind))].map(([name, text]) => h("li", {}, h("i", { class: name }), text))),
  );
}

function segment(start, end, total, kind, title) {
  const from = Math.max(0, Math.min(1, start / total));
  const to = Math.max(from, Math.min(1, end / total));
  const element = h("i", { class: kind, title });
  element.style.left = `${100 * from}%`;
  element.style.width = `${100 * (to - from)}%`;
  return element;
}

/** Return the class of a group of steps: what they computed for the request, or else for others. */
function kindOf(group) {
  if (group.own_prefill) return "own-prefill";
  if (group.own_decodes) return group.other_prefill ? "own-decode mixed" : "own-decode";
  return group.other_prefill ? "other-prefill" : "other-decode";
}

function stepText(group) {
  const parts = [
    group.own_prefill ? `${count(group.own_prefill)} tokens of its prompt` : "",
    group.own_decodes ? `${count(group.own_decodes)} tokens of its answer` : "",
    group.other_prefill ? `${count(group.other_prefill)} prompt tokens of others` : "",
    group.other_decodes ? `${count(group.other_decodes)} tokens of others' answers` : "",
  ];
  return `${count(group.steps)} step${group.steps === 1 ? "" : "s"}, ${duration(group.busy_s)}: ${parts.filter(Boolean).join(", ")}`;
}

// ---- the same as tables

function stageTable(timeline) {
  const rows = (timeline.stages ?? []).map((span) => [STAGES[span.stage], duration(span.start_s), duration(span.end_s - span.start_s)]);
  return table(["Stage", "From", "Time"], rows);
}

function stepTable(timeline) {
  const rows = (timeline.groups ?? []).map((group) => [
    group.steps === 1 ? count(group.first_step) : `${count(group.first_step)} … ${count(group.first_step + group.steps - 1)}`,
    duration(Math.max(0, group.start_s)),
    duration(group.busy_s),
    count(group.own_prefill ?? 0),
    count(group.own_decodes ?? 0),
    count(group.other_prefill ?? 0),
    count(group.other_decodes ?? 0),
    (group.prompts ?? []).map((share) => `${share.account || share.name || "another request"} (${count(share.tokens)} of ${count(share.prompt_tokens)})`).join(", "),
  ]);
  return table(["Steps", "From", "Time", "Own prompt", "Own answer", "Other prompts", "Other answers", "Whose prompts"], rows);
}

function table(names, rows) {
  const head = h("tr", {}, names.map((name) => h("th", { scope: "col" }, name)));
  const body = rows.map((cells) => h("tr", {}, cells.map((cell) => h("td", {}, cell))));
  return h("div", { class: "watch-scroll" }, h("table", { class: "plain" }, h("thead", {}, head), h("tbody", {}, body)));
}
