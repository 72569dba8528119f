// The list of conversations, with search, rename, export, import and delete.

import { fill, h, icon, iconButton, saveFile } from "./dom.js";
import { markedParts, patternsOf, search } from "./search.js";
import { addPresets, presets } from "./presets.js";
import { chats } from "./session.js";
import { MAX_CONVERSATIONS, forgetDraft } from "./store.js";
import { exported, readExport } from "./transfer.js";

const UNDO_MS = 8000;
const PIECE = 50; // conversations that are drawn at once; the next ones when the list is scrolled
const NEAR_PX = 400;

export class ConversationList {
  /** actions: { open(conversation, message), create() }. message: the one that a search has found */
  constructor(actions) {
    this.actions = actions;
    this.drawn = new Map(); // conversation -> { key, item }
    this.listed = []; // the conversations that match the search: { conversation, message, excerpt }
    this.patterns = [];
    this.numShown = PIECE;
    this.items = h("ul", { class: "conversations", onscroll: () => this.onScroll() });
    this.found = h("p", { class: "muted found-count", role: "status" });
    this.news = h("div", { class: "news", role: "status" });
    this.query = h("input", {
      type: "search",
      placeholder: "Search",
      title: "Search titles and texts (Alt + K)",
      "aria-label": "Search conversations",
      oninput: () => this.drawFirst(),
      onkeydown: (event) => this.onQueryKey(event),
    });
    const small = (picture, label, onclick) =>
      h("button", { type: "button", class: "button small ghost", onclick }, icon(picture), label);
    this.exportAll = small("download", "Export all", () =>
      saveExport("conversations", chats.conversations, presets()),
    );
    const file = h("input", {
      type: "file",
      accept: ".json,application/json",
      hidden: true,
      "aria-label": "File of conversations",
      onchange: () => this.import(file),
    });
    this.element = h(
      "div",
      { class: "list-body" },
      h(
        "button",
        {
          type: "button",
          class: "button create",
          onclick: actions.create,
          title: "New conversation (Alt + N)",
        },
        icon("plus"),
        "New conversation",
      ),
      this.query,
      this.found,
      this.items,
      this.news,
      h(
        "div",
        { class: "list-foot" },
        this.exportAll,
        small("upload", "Import", () => file.click()),
        file,
      ),
    );
  }

  focusSearch() {
    this.query.focus();
    this.query.select();
  }

  onQueryKey(event) {
    if (event.key === "Escape" && this.query.value) {
      event.stopPropagation();
      this.query.value = "";
      this.drawFirst();
    } else if (event.key === "Enter") {
      this.items.querySelector(".title")?.click();
    }
  }

  /** Draw the conversations that match the search, with one marked as open. */
  draw(current) {
    this.current = current;
    const all = chats.conversations;
    const patterns = patternsOf(this.query.value);
    const found = patterns.length
      ? search(all, patterns)
      : all.map((conversation) => ({ conversation, message: null, excerpt: null }));
    const before = this.drawn;
    this.drawn = new Map();
    this.listed = found;
    this.patterns = patterns;
    const place = found.findIndex(({ conversation }) => conversation === current);
    this.numShown = Math.max(this.numShown, place + 1);
    fill(
      this.items,
      found.slice(0, this.numShown).map((each) => this.itemOf(each, before)),
      this.rest(),
    );
    this.query.hidden = !all.length;
    this.exportAll.hidden = !all.length && !presets().length;
    this.found.textContent = patterns.length ? inWords(found.length, this.query.value.trim()) : "";
  }

  /** Draw what a changed search finds, from its start. */
  drawFirst() {
    this.numShown = PIECE;
    this.draw(this.current);
  }

  /** Return an entry that shows the next conversations; null if all are shown. */
  rest() {
    const count = this.listed.length - this.numShown;
    if (count <= 0) return null;
    const label = `Show ${Math.min(count, PIECE)} more`;
    const onclick = () => this.showMore({ takesFocus: true });
    return h("li", { class: "rest" }, h("button", { type: "button", class: "title", onclick }, label));
  }

  onScroll() {
    const { scrollTop, scrollHeight, clientHeight } = this.items;
    if (scrollTop + clientHeight > scrollHeight - NEAR_PX) this.showMore();
  }

  /** Draw the next conversations in place of the last entry. */
  showMore({ takesFocus = false } = {}) {
    const rest = this.items.querySelector(".rest");
    if (!rest) return;
    const hadFocus = takesFocus || rest.contains(document.activeElement);
    const more = this.listed.slice(this.numShown, this.numShown + PIECE);
    this.numShown += more.length;
    const items = [...more.map((each) => this.itemOf(each)), this.rest()];
    rest.replaceWith(...items.filter(Boolean));
    if (hadFocus) items[0].querySelector(".title").focus();
  }

  /** Return the item of a conversation: that drawn before, unless something of it has changed. */
  itemOf({ conversation, message, excerpt }, before = this.drawn) {
    const { patterns } = this;
    const isCurrent = conversation === this.current;
    const isRunning = chats.isRunning(conversation);
    const key = JSON.stringify([
      conversation.title,
      isCurrent,
      isRunning,
      excerpt,
      patterns.map(String),
    ]);
    const old = before.get(conversation);
    const item = old?.key === key ? old.item : this.item(conversation, message, excerpt, patterns);
    this.drawn.set(conversation, { key, item });
    return item;
  }

  item(conversation, message, excerpt, patterns) {
    const { title } = conversation;
    const isCurrent = conversation === this.current;
    const open = h(
      "button",
      {
        type: "button",
        class: "title",
        "aria-current": isCurrent ? "true" : null,
        onclick: () => this.actions.open(conversation, message),
      },
      marked(title, patterns),
      excerpt ? h("span", { class: "excerpt" }, marked(excerpt, patterns)) : null,
    );
    const item = h(
      "li",
      { class: isCurrent ? "current" : null },
      open,
      chats.isRunning(conversation) ? h("span", { class: "dot", title: "Answering" }) : null,
      h(
        "span",
        { class: "item-tools" },
        iconButton("edit", `Rename “${title}”`, () => this.rename(conversation, item)),
        iconButton("download", `Export “${title}”`, () => saveExport(title, [conversation])),
        iconButton("trash", `Delete “${title}”`, () => this.remove(conversation)),
      ),
    );
    return item;
  }

  rename(conversation, item) {
    const input = h("input", { value: conversation.title, "aria-label": "Title" });
    let isOver = false; // removing the field makes it lose the focus
    const finish = (isKept) => {
      if (isOver) return;
      isOver = true;
      if (isKept) chats.rename(conversation, input.value);
      else this.draw(this.current);
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") finish(true);
      else if (event.key === "Escape") {
        event.stopPropagation();
        finish(false);
      }
    });
    input.addEventListener("blur", () => finish(true));
    this.drawn.delete(conversation); // so that the field is replaced in the end
    fill(item, input);
    input.focus();
    input.select();
  }

  remove(conversation) {
    chats.remove(conversation);
    forgetDraft(conversation.id);
    if (conversation === this.current) this.actions.create();
    const restore = h(
      "button",
      {
        type: "button",
        class: "button small",
        onclick: () => {
          fill(this.news);
          chats.use(conversation);
        },
      },
      "Undo",
    );
    this.tell(h("span", {}, `“${conversation.title}” was deleted.`), restore);
  }

  /** Add the conversations of a file, and say how many there were, or what is wrong with it. */
  async import(input) {
    const [file] = input.files;
    if (!file) return;
    try {
      const found = readExport(await file.text());
      const numPresets = addPresets(found.presets);
      const count = await chats.addAll(found.conversations);
      this.tell(h("span", {}, describeImport({ ...count, numPresets })));
    } catch (error) {
      const words = `${file.name} was not imported. ${error.message}`;
      clearTimeout(this.timer);
      fill(this.news, h("span", { class: "notice bad" }, words));
    }
    input.value = ""; // the same file can be chosen again
  }

  tell(...news) {
    fill(this.news, news);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => fill(this.news), UNDO_MS);
  }
}

function marked(text, patterns) {
  return markedParts(text, patterns).map(({ text: part, isMatch }) =>
    isMatch ? h("mark", {}, part) : part,
  );
}

function inWords(number, query) {
  if (!number) return `Nothing found for “${query}”.`;
  return number === 1 ? "1 conversation" : `${number.toLocaleString("en")} conversations`;
}

/** Return the result of an import in words: "2 conversations were added, 1 was here already." */
function describeImport({ added, updated, known, removed, numPresets }) {
  const was = (number) => (number === 1 ? "was" : "were");
  const things = `conversation${added === 1 ? "" : "s"}`;
  const parts = [`${added || "No"} ${things} ${was(added)} added`];
  if (updated) parts.push(`${updated} ${was(updated)} replaced by a newer copy`);
  if (known) parts.push(`${known} ${was(known)} here already`);
  if (removed)
    parts.push(`${removed} ${was(removed)} removed, as at most ${MAX_CONVERSATIONS} are kept`);
  if (numPresets)
    parts.push(`${numPresets} preset${numPresets === 1 ? "" : "s"} ${was(numPresets)} added`);
  return `${parts.join(", ")}.`;
}

function saveExport(title, ...content) {
  const name = title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "conversation";
  saveFile(`${name}.json`, "application/json", exported(...content));
}
