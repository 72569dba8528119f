// The chat tab: the list of conversations, the thread, and the settings.

import { asPython, chatCurl, streamed } from "./requests.js";
import { errorBox, KEY_CHANGED } from "./api.js";
import { fill, h, icon, iconButton, loadStyle, oncePerFrame } from "./dom.js";
import { Attachments } from "./attachments.js";
import { ConversationList } from "./conversation-list.js";
import { loadFields } from "./fields.js";
import {
  fetchModels,
  fillModelSelect,
  knownModels,
  MODEL_CHOSEN,
  takeChosenModel,
} from "./models.js";
import { messageView } from "./message-view.js";
import { Panels } from "./panels.js";
import { chats } from "./session.js";
import { describeSettings, SettingsForm } from "./settings.js";
import { readDraft, writeDraft } from "./store.js";
import { ThreadScroll } from "./thread-scroll.js";
import { versionsOf } from "./versions.js";
import { welcome } from "./welcome.js";

const NO_CONVERSATION =
  "This browser has no conversation with this address. It was deleted, or is in another browser.";
const RETRY_S = 1;
const ANNOUNCED_CHARS = 2000;

const isAnswer = ({ role }) => role === "assistant";

export async function mount(root, context) {
  await Promise.all([loadStyle("chat.css"), chats.open()]);
  const chat = new ChatTab(root, context);
  await chat.start();
  return { unmount: () => chat.close(), onPath: (path) => chat.onPath(path) };
}

class ChatTab {
  constructor(root, context) {
    this.root = root;
    this.context = context;
    this.views = new Map(); // message id -> view
    this.abort = new AbortController(); // ends all listeners
    this.build();
  }

  build() {
    this.list = new ConversationList({
      open: (conversation) => this.openConversation(conversation),
      create: () => this.create(),
    });
    this.model = h("select", {
      class: "model",
      "aria-label": "Model",
      onchange: () => this.chooseModel(),
    });
    this.thread = h("div", {
      class: "thread",
      role: "log",
      "aria-live": "off",
      "aria-label": "Conversation",
      tabindex: 0,
    });
    this.scroll = new ThreadScroll(this.thread, this.abort.signal);
    this.files = new Attachments({
      model: () => this.modelEntry(),
      showProblem: (error) => this.showProblem(error),
    });
    this.input = h("textarea", {
      rows: 1,
      id: "prompt",
      placeholder: "Write a message",
      "aria-label": "Message",
      enterkeyhint: "send",
      value: readDraft(),
    });
    this.sendButton = h(
      "button",
      { type: "submit", class: "button primary send", "aria-label": "Send", title: "Send (Enter)" },
      icon("send"),
    );
    this.problem = h("div", { class: "problem" });
    this.changed = h("p", { class: "changed" });
    this.form = new SettingsForm({}, () => this.saveSettings());
    const composer = h(
      "form",
      { class: "composer" },
      this.files.element,
      this.files.chooser,
      this.files.button,
      this.input,
      this.sendButton,
    );
    const settingsButton = iconButton("sliders", "Settings", () => this.panels.toggle("settings"), {
      title: "Settings (Alt + S)",
      "aria-expanded": "false",
      "aria-controls": "chat-settings",
    });
    const listButton = iconButton("menu", "Conversations", () => this.panels.toggle("list"), {
      "aria-expanded": "false",
      "aria-controls": "chat-list",
    });
    const panels = {
      list: {
        element: h(
          "aside",
          { id: "chat-list", class: "side list", "aria-label": "Conversations" },
          this.list.element,
        ),
        button: listButton,
      },
      settings: {
        element: h(
          "aside",
          { id: "chat-settings", class: "side settings-side", "aria-label": "Settings" },
          h(
            "div",
            { class: "side-head" },
            h("h2", {}, "Settings"),
            iconButton("close", "Close the settings", () => this.panels.toggle("settings", false)),
          ),
          this.form.element,
        ),
        button: settingsButton,
      },
    };
    this.panels = new Panels(this.root, panels, this.abort.signal);
    const column = h(
      "section",
      { class: "column" },
      h(
        "div",
        { class: "toolbar" },
        listButton,
        this.model,
        iconButton("plus", "New conversation", () => this.create(), { class: "icon-button new" }),
        settingsButton,
      ),
      h(
        "div",
        { class: "scroll" },
        h("h2", { class: "visually-hidden" }, "Messages"), // above the headings of answers
        this.thread,
        this.scroll.button,
      ),
      h(
        "div",
        { class: "bottom" },
        this.problem,
        this.changed,
        composer,
        h("p", { class: "hint muted" }, "Conversations stay in this browser."),
      ),
    );
    const shade = h("div", { class: "shade", onclick: () => this.panels.close() });
    fill(
      this.root,
      h("h1", { class: "visually-hidden" }, "Chat"),
      panels.list.element,
      column,
      panels.settings.element,
      shade,
    );
    composer.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.isRunning) this.stop();
      else this.send(this.input.value);
    });
    this.listen(composer);
  }

  listen(composer) {
    const { signal } = this.abort;
    this.draw = oncePerFrame(() => this.drawChanged());
    const on = (target, name, run) => target.addEventListener(name, run, { signal });
    on(chats, "thread", ({ detail }) => detail === this.conversation && this.drawThread());
    on(chats, "message", ({ detail }) => detail.conversation === this.conversation && this.draw());
    on(chats, "end", ({ detail }) => this.onEnd(detail));
    on(chats, "list", () => this.list.draw(this.conversation));
    on(document, "keydown", (event) => this.onKey(event));
    on(this.input, "keydown", (event) => this.onInputKey(event, composer));
    on(this.input, "input", () => this.onInput());
    this.files.listen(this.root, this.input, signal);
    on(window, KEY_CHANGED, () => this.loadModels());
    on(window, MODEL_CHOSEN, () => this.openChosen());
    on(document, "visibilitychange", () => document.hidden || this.loadModels());
  }

  async start() {
    this.onPath(this.context.path);
    this.openChosen();
    // Not after the models have arrived: the user may be typing elsewhere by then.
    if (matchMedia("(hover: hover)").matches) this.input.focus();
    await this.loadModels();
    this.resize();
  }

  close() {
    clearTimeout(this.retry);
    this.abort.abort();
  }

  get isRunning() {
    return chats.isRunning(this.conversation);
  }

  // ---- the conversation

  onPath(id) {
    const found = chats.get(id);
    if (found && found === this.conversation) return;
    this.openConversation(found ?? chats.draft(this.model.value || knownModels()[0]?.id || ""));
    if (id && !found) this.showProblem(new Error(NO_CONVERSATION));
  }

  /** Open a new conversation with the model that the user has chosen elsewhere, if there is one. */
  openChosen() {
    const id = takeChosenModel();
    if (!id) return;
    this.openConversation(chats.draft(id));
    this.input.focus();
  }

  create() {
    this.openConversation(chats.draft(this.conversation.model, this.conversation.settings));
    this.input.focus();
  }

  openConversation(conversation) {
    this.conversation = conversation;
    this.context.setPath(chats.get(conversation.id) ? conversation.id : "");
    this.panels.close({ onlyOver: true });
    this.showProblem(null);
    this.showModels();
    this.list.draw(conversation);
    this.views.clear();
    this.drawThread();
    this.scroll.toEnd();
  }

  async send(text) {
    if (!text.trim() && !this.files.entries.length) return;
    if (!this.conversation.model) await this.awaitModels();
    const act = () => chats.send(this.conversation, text, this.files.ready());
    if (!this.tryTo(act)) return;
    this.files.clear();
    this.input.value = "";
    this.onInput();
    this.scroll.toEnd();
  }

  stop() {
    chats.stop(this.conversation);
  }

  /** Run an action. Show why, if it is not possible. */
  tryTo(act) {
    try {
      this.showProblem(null);
      if (!this.conversation.model) throw this.modelsProblem ?? new Error("No model is available.");
      act();
      this.context.setPath(this.conversation.id);
      this.context.announce("Answering.");
      return true;
    } catch (error) {
      this.showProblem(error);
      return false;
    }
  }

  showProblem(error) {
    this.shownProblem = error;
    fill(this.problem, error ? errorBox(error) : null);
  }

  onEnd({ conversation, message }) {
    if (conversation !== this.conversation) return;
    this.drawChanged();
    for (const each of conversation.messages) this.drawMessage(each); // their versions are unlocked
    const text = message.error?.message ?? (message.content || "The answer has no text.");
    this.context.announce(text.slice(0, ANNOUNCED_CHARS));
    this.list.draw(conversation);
    if (message.hasLoaded) this.loadModels(); // others may have been unloaded for it
  }

  // ---- models and settings

  loadModels() {
    this.loading = this.fetchModels().finally(() => (this.loading = null));
    return this.loading;
  }

  /** Wait for the list of models. If it could not be fetched, try again, which may ask for a key. */
  awaitModels() {
    return this.loading ?? this.loadModels();
  }

  /** Fetch the models and show them. While the server is not ready, try again and again. */
  async fetchModels() {
    clearTimeout(this.retry);
    const before = JSON.stringify(knownModels());
    try {
      const models = await fetchModels();
      await loadFields(); // not before: it may need the same key
      if (this.modelsProblem && this.shownProblem === this.modelsProblem) this.showProblem(null);
      this.modelsProblem = null;
      if (!this.model.value || JSON.stringify(models) !== before) this.showModels();
    } catch (error) {
      this.modelsProblem = error;
      this.showProblem(error);
      const waitMs = 1000 * (error.retryAfterS ?? RETRY_S);
      if (error.status === 503 && !this.abort.signal.aborted) {
        this.retry = setTimeout(() => this.loadModels(), waitMs);
      }
    }
  }

  showModels() {
    const { conversation } = this;
    conversation.model =
      fillModelSelect(this.model, knownModels(), conversation.model) || conversation.model;
    this.form.show(conversation.settings, this.modelEntry());
    this.files.recount();
    this.drawChangedSettings();
    this.drawEmpty();
  }

  /** Say which settings apply to the next message, as a new conversation has those of the last one. */
  drawChangedSettings() {
    const words = describeSettings(this.conversation.settings);
    const action = (label, onclick) =>
      h("button", { type: "button", class: "button small ghost", onclick }, label);
    fill(
      this.changed,
      ...(words.length
        ? [
            h("span", {}, `Settings: ${words.join(", ")}`),
            action("Change", () => this.panels.toggle("settings", true)),
            action("Use the defaults", () => this.form.reset()),
          ]
        : []),
    );
  }

  /** Return the entry of GET /v1/models for the conversation's model, or null. */
  modelEntry() {
    return knownModels().find(({ id }) => id === this.conversation.model) ?? null;
  }

  chooseModel() {
    this.conversation.model = this.model.value;
    this.showModels();
    this.saveSettings();
  }

  saveSettings() {
    this.drawChangedSettings();
    if (this.conversation.messages.length) chats.save(this.conversation);
  }

  // ---- the thread

  drawThread() {
    const { messages } = this.conversation;
    const actions = {
      edit: (message, text) => this.tryTo(() => chats.edit(this.conversation, message, text)),
      retry: (message) => this.tryTo(() => chats.retry(this.conversation, message)),
      goOn: () => this.tryTo(() => chats.goOn(this.conversation)),
      showVersion: (message, by) => this.showVersion(message, by),
      answerCalls: (results) => this.tryTo(() => chats.answerCalls(this.conversation, results)),
      curl: (message) => chatCurl(streamed(chats.bodyOf(this.conversation, message))),
      python: (message) => asPython(chats.bodyOf(this.conversation, message)),
    };
    const kept = new Map(
      messages.map((message) => [
        message.id,
        this.views.get(message.id) ?? messageView(message, actions),
      ]),
    );
    this.views = kept;
    const wanted = [...kept.values()].map(({ element }) => element);
    fill(this.thread, wanted);
    this.scroll.observe(wanted);
    for (const message of messages) this.drawMessage(message);
    this.drawEmpty();
    this.drawState();
  }

  drawMessage(message) {
    const { conversation, isRunning } = this;
    const isLast = message === conversation.messages.at(-1);
    const versions = versionsOf(conversation, message);
    this.views.get(message.id)?.update({
      isLast,
      isRunning: isLast && isRunning,
      isLocked: isRunning,
      version: versions.indexOf(message),
      versions: versions.length,
    });
  }

  showVersion(message, by) {
    const shown = message && chats.showVersion(this.conversation, message, by);
    if (!shown) return;
    const { picker, element } = this.views.get(shown.id);
    picker.focus();
    element.scrollIntoView({ block: "nearest" });
    this.context.announce(`${picker.element.getAttribute("aria-label")}.`);
  }

  /** Draw what an answer in progress has changed: the last message. */
  drawChanged() {
    const last = this.conversation.messages.at(-1);
    if (last) this.drawMessage(last);
    this.drawState();
  }

  drawEmpty() {
    if (this.conversation.messages.length) return;
    fill(
      this.thread,
      welcome(this.modelEntry(), (text) => this.send(text)),
    );
  }

  drawState() {
    const { isRunning } = this;
    if (this.wasRunning === isRunning) return;
    this.wasRunning = isRunning;
    const label = isRunning ? "Stop" : "Send";
    this.sendButton.setAttribute("aria-label", label);
    this.sendButton.title = isRunning ? "Stop (Esc)" : "Send (Enter)";
    this.sendButton.classList.toggle("stop", isRunning);
    fill(this.sendButton, icon(isRunning ? "stop" : "send"));
  }

  onInput() {
    writeDraft(this.input.value);
    this.resize();
  }

  resize() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight + 2, 220)}px`;
  }

  // ---- keys and panels

  onKey(event) {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
      if (this.isRunning) this.stop();
      else this.panels.close({ onlyOver: true });
    }
    const lastAnswer = () => this.conversation.messages.findLast(isAnswer);
    const run = {
      KeyN: () => this.create(),
      KeyR: () => this.retryLast(),
      KeyS: () => this.panels.toggle("settings"),
      Comma: () => this.showVersion(lastAnswer(), -1),
      Period: () => this.showVersion(lastAnswer(), 1),
    }[event.code];
    if (event.altKey && !event.ctrlKey && run) {
      event.preventDefault();
      run();
    }
  }

  retryLast() {
    if (this.conversation.messages.length) this.tryTo(() => chats.retry(this.conversation));
  }

  onInputKey(event, composer) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!this.isRunning) composer.requestSubmit();
    } else if (event.key === "ArrowUp" && !this.input.value) {
      const last = this.conversation.messages.findLast(({ role }) => role === "user");
      if (last) {
        event.preventDefault();
        this.views.get(last.id).startEdit();
      }
    }
  }
}
