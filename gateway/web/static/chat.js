// The chat tab: the list of conversations, the thread, and the settings.

import { asPython, chatCurl, streamed } from "./requests.js";
import { errorBox } from "./api.js";
import { fill, h, icon, iconButton, loadStyle, oncePerFrame } from "./dom.js";
import { Attachments } from "./attachments.js";
import { ConversationList } from "./conversation-list.js";
import { ModelMenu } from "./model-menu.js";
import { knownModels, MODEL_CHOSEN, takeChosenModel } from "./models.js";
import { messageView } from "./message-view.js";
import { Panels } from "./panels.js";
import { PRESETS_CHANGED } from "./presets.js";
import { chats } from "./session.js";
import { SettingsPanel } from "./settings-panel.js";
import { forgetDraft, readDraft, writeDraft, writeDraftFiles } from "./store.js";
import { ThreadScroll } from "./thread-scroll.js";
import { versionsOf } from "./versions.js";
import { welcome } from "./welcome.js";

const NO_CONVERSATION =
  "This browser has no conversation with this address. It was deleted, or is in another browser.";
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
      open: (conversation, message) => this.openFound(conversation, message),
      create: () => this.create(),
    });
    this.menu = new ModelMenu(
      {
        onChoose: (id) => this.chooseModel(id),
        onModels: () => this.showModels(),
        onProblem: (error) => this.showModelsProblem(error),
      },
      this.abort.signal,
    );
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
      onChange: () => this.drawSendable(),
      keep: (files) => writeDraftFiles(this.draftKey, files),
    });
    this.input = h("textarea", {
      rows: 1,
      id: "prompt",
      placeholder: "Write a message",
      "aria-label": "Message",
      enterkeyhint: "send",
    });
    this.sendButton = h(
      "button",
      { type: "submit", class: "button primary send", "aria-label": "Send", title: "Send (Enter)" },
      icon("send"),
    );
    this.problem = h("div", { class: "problem" });
    this.settings = new SettingsPanel(
      {
        onChange: () => this.saveSettings(),
        onPreset: (settings) => this.takePreset(settings),
        toggle: (isOpen) => this.panels.toggle("settings", isOpen),
      },
      this.abort.signal,
    );
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
        element: this.settings.element,
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
        this.menu.element,
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
        this.settings.changed,
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
    on(window, MODEL_CHOSEN, () => this.openChosen());
    on(window, PRESETS_CHANGED, () => {
      this.drawEmpty();
      this.list.draw(this.conversation); // whether there is something to export
    });
  }

  async start() {
    this.onPath(this.context.path);
    this.openChosen();
    // Not after the models have arrived: the user may be typing elsewhere by then.
    if (matchMedia("(hover: hover)").matches) this.input.focus();
    await this.menu.load();
    this.resize();
  }

  close() {
    this.abort.abort();
  }

  get isRunning() {
    return chats.isRunning(this.conversation);
  }

  // ---- the conversation

  onPath(id) {
    const found = chats.get(id);
    if (found && found === this.conversation) return;
    this.openConversation(found ?? chats.draft(this.menu.value || knownModels()[0]?.id || ""));
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
    this.showDraft();
    this.scroll.toEnd();
  }

  /** Open a conversation that was found, at one of its messages. */
  openFound(conversation, message) {
    this.openConversation(conversation);
    const element = this.views.get(message?.id)?.element;
    if (!element) return;
    element.classList.add("found");
    this.scroll.show(element, "start");
  }

  async send(text) {
    if (!text.trim() && !this.files.entries.length) return;
    if (!this.conversation.model) await this.menu.wait();
    const key = this.draftKey;
    const act = () => chats.send(this.conversation, text, this.files.ready());
    if (!this.tryTo(act)) return;
    forgetDraft(key);
    this.showDraft();
    this.scroll.toEnd();
  }

  stop() {
    chats.stop(this.conversation);
  }

  /** Run an action. Show why, if it is not possible. */
  tryTo(act) {
    try {
      this.showProblem(null);
      if (!this.conversation.model) throw this.menu.problem ?? new Error("No model is available.");
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
    if (message.hasLoaded) this.menu.load(); // others may have been unloaded for it
  }

  // ---- models and settings

  /** Show why the models could not be fetched; null: take that away again. */
  showModelsProblem(error) {
    if (error || this.shownProblem === this.modelsProblem) this.showProblem(error);
    this.modelsProblem = error;
  }

  showModels() {
    const { conversation } = this;
    conversation.model = this.menu.choose(conversation.model) || conversation.model;
    this.settings.show(conversation.settings, this.modelEntry());
    this.files.checkAll();
    this.drawEmpty();
  }

  /** Return the entry of GET /v1/models for the conversation's model, or null. */
  modelEntry() {
    return knownModels().find(({ id }) => id === this.conversation.model) ?? null;
  }

  chooseModel(id) {
    this.conversation.model = id;
    this.showModels();
    this.saveSettings();
  }

  takePreset(settings) {
    this.conversation.settings = settings;
    this.showModels();
    this.saveSettings();
  }

  saveSettings() {
    this.drawEmpty();
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
    const viewOf = (message) => {
      const view = this.views.get(message.id);
      return view?.message === message ? view : messageView(message, actions); // or it was imported
    };
    const kept = new Map(messages.map((message) => [message.id, viewOf(message)]));
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
    this.scroll.show(element, "nearest");
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
      welcome({
        model: this.modelEntry(),
        settings: this.conversation.settings,
        send: (text) => this.send(text),
        choose: (settings) => {
          this.takePreset(settings);
          this.input.focus();
        },
      }),
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
    this.drawSendable();
  }

  /** An empty message cannot be sent, but an answer in progress can be stopped. */
  drawSendable() {
    const isEmpty = !this.input.value.trim() && !this.files.entries.length;
    this.sendButton.disabled = !this.isRunning && isEmpty;
  }

  onInput() {
    writeDraft(this.draftKey, this.input.value);
    this.resize();
    this.drawSendable();
  }

  /** Return the name of the text and the files that are not sent yet. All new conversations share one. */
  get draftKey() {
    return chats.get(this.conversation.id) ? this.conversation.id : "";
  }

  showDraft() {
    const { text, files } = readDraft(this.draftKey);
    this.input.value = text;
    this.files.show(files);
    this.resize();
    this.drawSendable();
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
      KeyK: () => {
        this.panels.toggle("list", true);
        this.list.focusSearch();
      },
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
