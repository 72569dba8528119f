// The conversations of the chat tab: what is asked, answered, edited and kept. It draws nothing.
//
// An answer goes on when the user looks at another conversation or another tab. Views listen to:
//
//   list      conversations were added, removed, renamed or reordered
//   thread    messages were added or removed; detail: the conversation
//   message   a message has changed; detail: { conversation, message }
//   end       an answer has ended; detail: { conversation, message }

import { newAnswer, newId, newMessage, reopen, streamAnswer } from "./answer.js";
import { apiMessages, chatBody, continued, streamed } from "./requests.js";
import { ConversationStore } from "./store.js";
import { adopt, append, hideFrom, show, versionsOf } from "./versions.js";

const TITLE_CHARS = 60;
const SAVE_EVERY_MS = 2000;

class Chats extends EventTarget {
  constructor() {
    super();
    this.store = new ConversationStore();
    this.conversations = []; // the last used first
    this.running = new Map(); // conversation id -> AbortController
    this.opening = null;
    this.savedAt = 0;
  }

  /** Load the conversations once. */
  open() {
    this.opening ??= this.store.open().then((found) => {
      this.conversations = found;
      found.forEach(complete);
    });
    return this.opening;
  }

  get(id) {
    return this.conversations.find((conversation) => conversation.id === id);
  }

  /** Return a new conversation. It is listed and kept once it has a message. */
  draft(model, settings = {}) {
    const id = newId();
    const parts = { messages: [], hidden: [] };
    return { id, title: "", model, settings: { ...settings }, ...parts, used: Date.now() };
  }

  isRunning(conversation) {
    return this.running.has(conversation.id);
  }

  /** Add a message of the user, with files ({ name, text, tokens } or { name, image }), and answer it. Raises
   * Error if the settings are invalid. */
  send(conversation, text, files = []) {
    this.check(conversation);
    conversation.title ||= titleOf(text || files[0].name);
    append(conversation, { ...newMessage("user", text), files });
    return this.answer(conversation);
  }

  /** Add another version of a message of the user, with the same files, and answer it. */
  edit(conversation, message, text) {
    const { files = [] } = message;
    this.check(conversation);
    this.stop(conversation);
    hideFrom(conversation, message);
    if (conversation.messages.length === 0) conversation.title = titleOf(text || files[0].name);
    append(conversation, { ...newMessage("user", text), files });
    return this.answer(conversation);
  }

  /** Add another version of an answer. */
  retry(conversation, answer = conversation.messages.findLast(({ role }) => role === "assistant")) {
    this.check(conversation);
    this.stop(conversation);
    if (answer) hideFrom(conversation, answer);
    return this.answer(conversation);
  }

  /** Show the version before a message (by: -1) or after it (1), if there is one. Return it. */
  showVersion(conversation, message, by) {
    const versions = versionsOf(conversation, message);
    const version = versions[versions.indexOf(message) + by];
    if (!version || this.isRunning(conversation)) return null;
    show(conversation, version);
    this.emit("thread", conversation);
    this.save(conversation);
    return version;
  }

  /** Add the results of all calls of the last answer, and let the model go on. */
  answerCalls(conversation, results) {
    this.check(conversation);
    const { calls } = conversation.messages.at(-1);
    calls.forEach(({ id, name }, place) => {
      append(conversation, { ...newMessage("tool", results[place]), callId: id, name });
    });
    return this.answer(conversation);
  }

  /** Return the body of the request that `answer` answers. */
  bodyOf(conversation, answer) {
    const before = conversation.messages.slice(0, conversation.messages.indexOf(answer));
    return chatBody(answer.model, apiMessages(before), answer.settings);
  }

  check(conversation) {
    chatBody(conversation.model, [], conversation.settings);
  }

  /** Let the last answer, which was cut, go on where it ends, with the settings of now. */
  goOn(conversation) {
    const answer = conversation.messages.at(-1);
    this.check(conversation);
    reopen(answer);
    const { messages, ...fields } = continued(conversation.messages);
    const body = chatBody(answer.model, messages, conversation.settings);
    return this.stream(conversation, answer, { ...body, ...fields });
  }

  answer(conversation) {
    this.stop(conversation);
    const { model, settings, messages } = conversation;
    const body = chatBody(model, apiMessages(messages), settings);
    const answer = newAnswer(model, settings);
    append(conversation, answer);
    return this.stream(conversation, answer, body);
  }

  async stream(conversation, answer, body) {
    const controller = new AbortController();
    this.running.set(conversation.id, controller);
    this.use(conversation);
    this.emit("thread", conversation);
    await streamAnswer(answer, streamed(body), controller.signal, () => {
      this.emit("message", { conversation, message: answer });
      if (Date.now() - this.savedAt > SAVE_EVERY_MS) this.save(conversation);
    });
    if (this.running.get(conversation.id) === controller) this.running.delete(conversation.id);
    this.emit("end", { conversation, message: answer });
    this.save(conversation);
  }

  /** End the answer in progress, if there is one. The server frees its resources at once. */
  stop(conversation) {
    this.running.get(conversation.id)?.abort();
    this.running.delete(conversation.id);
  }

  /** List a conversation first, and keep it. */
  use(conversation) {
    conversation.used = Date.now();
    this.conversations = [
      conversation,
      ...this.conversations.filter((each) => each !== conversation),
    ];
    this.emit("list");
    this.save(conversation);
  }

  /**
   * Add conversations of a file. One that is here already is replaced if the file's was used later.
   * Return { added, updated, known, removed }: their numbers. `removed` found no room.
   */
  async addAll(found) {
    const changed = [];
    const count = { added: 0, updated: 0, known: 0, removed: 0 };
    for (const conversation of found) {
      const own = this.get(conversation.id);
      const isNewer = own && conversation.used > own.used && !this.isRunning(own);
      count[isNewer ? "updated" : own ? "known" : "added"] += 1;
      if (own && !isNewer) continue;
      complete(conversation);
      changed.push(own ? Object.assign(own, conversation) : conversation);
      if (!own) this.conversations.push(conversation);
    }
    this.conversations.sort((a, b) => b.used - a.used);
    const removed = await this.store.saveAll(changed).catch(() => []);
    this.conversations = this.conversations.filter(({ id }) => !removed.includes(id));
    for (const conversation of changed) this.emit("thread", conversation);
    this.emit("list");
    return { ...count, removed: removed.length };
  }

  rename(conversation, title) {
    conversation.title = title.trim().slice(0, TITLE_CHARS) || conversation.title;
    this.emit("list");
    this.save(conversation);
  }

  remove(conversation) {
    this.stop(conversation);
    this.conversations = this.conversations.filter((each) => each !== conversation);
    this.store.remove(conversation.id);
    this.emit("list");
  }

  async save(conversation) {
    this.savedAt = Date.now();
    if (!this.conversations.includes(conversation)) return;
    const removed = await this.store.save(conversation).catch(() => []);
    if (!removed.length) return;
    this.conversations = this.conversations.filter(({ id }) => !removed.includes(id));
    this.emit("list");
  }

  emit(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }
}

/** Add what a conversation lacks that was stored, or exported, before its last answer was complete. */
function complete(conversation) {
  adopt(conversation);
  for (const message of [...conversation.messages, ...conversation.hidden])
    if (message.finish === null && !message.error) message.finish = "interrupted";
}

function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > TITLE_CHARS ? `${line.slice(0, TITLE_CHARS - 1)}…` : line;
}

/** The conversations of this page. */
export const chats = new Chats();
