// The list of conversations, with rename, export and delete.

import { fill, h, icon, iconButton, saveFile } from "./dom.js";
import { chats } from "./session.js";

const UNDO_MS = 8000;
const PIECE = 50; // conversations that are drawn at once; the next ones when the list is scrolled
const NEAR_PX = 400;

export class ConversationList {
  /** actions: { open(conversation), create() } */
  constructor(actions) {
    this.actions = actions;
    this.numShown = PIECE;
    this.items = h("ul", { class: "conversations", onscroll: () => this.onScroll() });
    this.undo = h("div", { class: "undo", role: "status" });
    const exportAll = h(
      "button",
      {
        type: "button",
        class: "button small ghost",
        onclick: () => exportConversations(chats.conversations, "conversations"),
      },
      icon("download"),
      "Export all",
    );
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
      this.items,
      this.undo,
      h("div", { class: "list-foot" }, exportAll),
    );
  }

  /** Draw the list, with one conversation marked as open. */
  draw(current) {
    this.current = current;
    const shown = Math.max(this.numShown, chats.conversations.indexOf(current) + 1);
    fill(
      this.items,
      chats.conversations.slice(0, shown).map((conversation) => this.item(conversation)),
      this.rest(shown),
    );
    this.numShown = shown;
  }

  /** Return an entry that shows the conversations after the first `shown`; null if there are none. */
  rest(shown) {
    const count = chats.conversations.length - shown;
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
    const more = chats.conversations.slice(this.numShown, this.numShown + PIECE);
    this.numShown += more.length;
    const items = [...more.map((each) => this.item(each)), this.rest(this.numShown)];
    rest.replaceWith(...items.filter(Boolean));
    if (hadFocus) items[0].querySelector(".title").focus();
  }

  item(conversation) {
    const { title } = conversation;
    const isCurrent = conversation === this.current;
    const open = h(
      "button",
      {
        type: "button",
        class: "title",
        "aria-current": isCurrent ? "true" : null,
        onclick: () => this.actions.open(conversation),
      },
      title,
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
        iconButton("download", `Export “${title}”`, () =>
          exportConversations([conversation], title),
        ),
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
    fill(item, input);
    input.focus();
    input.select();
  }

  remove(conversation) {
    chats.remove(conversation);
    if (conversation === this.current) this.actions.create();
    const restore = h(
      "button",
      {
        type: "button",
        class: "button small",
        onclick: () => {
          fill(this.undo);
          chats.use(conversation);
        },
      },
      "Undo",
    );
    fill(this.undo, h("span", {}, `“${conversation.title}” was deleted.`), restore);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => fill(this.undo), UNDO_MS);
  }
}

function exportConversations(conversations, title) {
  const name = title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "conversation";
  saveFile(
    `${name}.json`,
    "application/json",
    JSON.stringify({ tidegate: 1, conversations }, null, 2),
  );
}
