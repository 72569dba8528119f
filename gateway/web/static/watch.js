// The watch tab: what the engines do now, and where the time of one request went.
//
// The pictures are in watch-charts.js, the table of requests in watch-requests.js, and the timeline of
// a request in watch-timeline.js. This module has the stream of frames (GET /v1/watch), its reconnections
// and the parts that are shown for each engine.

import { ApiError, errorBox, KEY_CHANGED, storeKey, streamEvents } from "./api.js";
import { fill, h, loadStyle, oncePerFrame } from "./dom.js";
import { blocksBar, History, numbers, queueText, slotCells, statesCard, stepColumns } from "./watch-charts.js";
import { RequestTable } from "./watch-requests.js";
import { TimelinePanel } from "./watch-timeline.js";
import { inWords } from "./watch-words.js";

const RETRY_MS = 1000;
const MAX_RETRY_MS = 10_000;

export async function mount(root, context) {
  await loadStyle("watch.css");
  const tab = new WatchTab(root, context);
  tab.start();
  return { unmount: () => tab.close(), onPath: (path) => tab.select(path) };
}

class WatchTab {
  constructor(root, context) {
    this.context = context;
    this.closed = new AbortController(); // ends all listeners
    this.stream = null; // AbortController of the stream in progress
    this.isPaused = false;
    this.frame = null;
    this.engines = new Map(); // key -> EngineView
    this.draw = oncePerFrame(() => this.drawFrame());
    this.build(root);
    const { signal } = this.closed;
    addEventListener(KEY_CHANGED, () => this.restart(), { signal });
    document.addEventListener("visibilitychange", () => this.restart(), { signal });
    if (context.path) this.select(context.path);
  }

  build(root) {
    this.state = h("p", { class: "watch-state muted", role: "status" }, "Connecting …");
    this.problem = h("div", {});
    this.places = h("div", { class: "watch-engines" });
    this.panel = new TimelinePanel(() => this.select(""));
    this.table = new RequestTable((name) => this.select(name));
    this.input = h("input", { id: "watch-id", placeholder: "chatcmpl-…", autocomplete: "off", spellcheck: "false" });
    const find = h(
      "form",
      { class: "row watch-find", onsubmit: (event) => this.onFind(event) },
      h("label", { for: "watch-id" }, "Why was this request slow?"),
      this.input,
      h("button", { type: "submit", class: "button" }, "Explain"),
    );
    this.words = h("p", { class: "watch-words" });
    this.pause = h("button", { type: "button", class: "button small", "aria-pressed": "false", onclick: () => this.togglePause() }, "Pause");
    fill(
      root,
      h(
        "div",
        { class: "page watch-page" },
        h("div", { class: "row watch-head" }, h("h1", {}, "Watch"), this.state, this.pause),
        this.problem,
        this.places,
        h("details", { class: "watch-alternative" }, h("summary", {}, "In words"), this.words),
        h("section", { "aria-label": "Requests" }, h("h2", {}, "Requests"), find, this.panel.root, this.table.root),
      ),
    );
  }

  // ---- the stream

  start() {
    if (this.isPaused || document.hidden || this.stream || this.closed.signal.aborted) return;
    this.stream = new AbortController();
    this.follow(this.stream.signal);
  }

  stop() {
    this.stream?.abort();
    this.stream = null;
    this.panel.pause();
  }

  restart() {
    this.stop();
    this.start();
  }

  close() {
    this.closed.abort();
    this.stop();
    this.panel.close();
  }

  /** Show frames until `signal` is aborted. If the connection is lost, connect again. */
  async follow(signal) {
    let retryMs = RETRY_MS;
    while (!signal.aborted) {
      try {
        for await (const { data } of streamEvents("v1/watch", undefined, { signal })) {
          if (signal.aborted) return;
          retryMs = RETRY_MS;
          this.show(data);
        }
        this.state.textContent = "The server has ended the stream. Reconnecting …";
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof ApiError && error.status >= 400 && error.status < 500) return this.refuse(error);
        this.state.textContent = `${error.message} Reconnecting …`;
      }
      await new Promise((resolve) => setTimeout(resolve, retryMs));
      retryMs = Math.min(2 * retryMs, MAX_RETRY_MS);
    }
    return undefined;
  }

  /** Show why the server does not let this visitor watch. */
  refuse(error) {
    this.state.textContent = "Watching needs an API key with the scope admin, or a browser on the server's machine.";
    const other = h("button", { type: "button", class: "button", onclick: () => storeKey("") }, "Use another key");
    fill(this.problem, errorBox(error), error.status === 403 ? h("div", { class: "row watch-other" }, other) : null);
    this.frame = null;
    this.engines.clear();
    fill(this.places);
    this.words.textContent = "";
    this.table.forget();
  }

  show(frame) {
    this.frame = frame;
    for (const engine of frame.engines) this.view(engine).history.push(engine, frame.every_s);
    this.draw();
  }

  togglePause() {
    this.isPaused = !this.isPaused;
    this.pause.setAttribute("aria-pressed", String(this.isPaused));
    this.pause.textContent = this.isPaused ? "Resume" : "Pause";
    if (this.isPaused) this.stop();
    else this.start();
    if (this.isPaused) this.state.textContent = "Paused";
    this.context.announce(this.isPaused ? "Paused" : "Resumed");
  }

  // ---- drawing

  view(engine) {
    const key = `${engine.model}/${engine.role}/${engine.engine}`;
    if (!this.engines.has(key)) {
      const view = new EngineView();
      this.engines.set(key, view);
      this.places.append(view.root);
    }
    return this.engines.get(key);
  }

  drawFrame() {
    const { frame } = this;
    if (!frame || this.closed.signal.aborted) return;
    fill(this.problem);
    this.state.textContent = `Live, every ${frame.every_s} s`;
    const shown = new Set(frame.engines.map((engine) => this.view(engine)));
    for (const [key, view] of this.engines) {
      if (shown.has(view)) continue;
      view.root.remove();
      this.engines.delete(key);
    }
    for (const engine of frame.engines) this.view(engine).draw(engine, frame.engines.length > 1);
    this.words.textContent = frame.engines.map(inWords).join(" ");
    this.table.draw(frame.engines);
    this.panel.onFrame();
  }

  // ---- requests

  onFind(event) {
    event.preventDefault();
    const name = this.input.value.trim();
    if (name) this.select(name);
  }

  /** Show the timeline of a request; "": of none. */
  select(name) {
    this.context.setPath(name);
    this.table.select(name);
    this.panel.show(name);
  }
}

/** What is shown of one engine. */
class EngineView {
  constructor() {
    this.history = new History();
    this.title = h("h2", {});
    this.error = h("div", {});
    this.numbers = numbers();
    this.slots = slotCells();
    this.blocks = blocksBar();
    this.states = statesCard();
    this.queue = h("p", { class: "watch-queue" });
    this.steps = stepColumns();
    this.root = h(
      "section",
      { class: "watch-engine" },
      this.title,
      this.error,
      this.numbers.root,
      h(
        "div",
        { class: "watch-charts" },
        h("div", { class: "card" }, h("h3", {}, "Slots and queue"), this.slots.root, this.queue),
        h("div", { class: "card" }, h("h3", {}, "Blocks of the KV cache"), this.blocks.root),
        h("div", { class: "card" }, h("h3", {}, "Steps"), this.steps.root),
        this.states.root,
      ),
    );
  }

  draw(engine, isOneOfMany) {
    const place = engine.role ? `${engine.role} ${engine.engine}` : `engine ${engine.engine}`;
    const name = isOneOfMany ? `${engine.model} · ${place}` : engine.model || "Engine";
    if (this.title.textContent !== name) this.title.textContent = name;
    this.root.setAttribute("aria-label", name);
    const trouble = engine.error || engine.stats.worker?.trouble;
    fill(this.error, trouble ? h("p", { class: "notice warn" }, trouble) : null);
    this.numbers.draw(engine, this.history);
    this.slots.draw(engine);
    this.blocks.draw(engine);
    this.states.draw(engine);
    this.queue.textContent = queueText(engine);
    this.steps.draw(engine, this.history);
  }
}
