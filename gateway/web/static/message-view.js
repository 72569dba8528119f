// Shows one message of a conversation, and changes with it while it is streamed.

import { canContinue, describeEnd, describeLoading, describeSpeed } from "./answer.js";
import { errorBox } from "./api.js";
import { tokensInWords } from "./attachments.js";
import { codeBlock } from "./code-block.js";
import { copyButton, fill, h, icon, iconButton } from "./dom.js";
import { LineParts } from "./line-parts.js";
import { MarkdownView } from "./markdown.js";
import { TokensView } from "./tokens.js";

/**
 * actions: edit(message, text), retry(message), goOn(), showVersion(message, by),
 * answerCalls(results), curl(message), python(message)
 */
export function messageView(message, actions) {
  if (message.role === "user") return new UserView(message, actions);
  if (message.role === "tool") return new ResultView(message);
  return new AnswerView(message, actions);
}

/** The place of a message among its versions, "1/2", with a button to each side. */
class VersionPicker {
  constructor(pick) {
    const side = (by, label, picture) => iconButton(picture, label, () => pick(by));
    this.sides = [side(-1, "Previous version", "back"), side(1, "Next version", "chevron")];
    this.place = h("span", {});
    this.element = h(
      "span",
      { class: "versions", role: "group", hidden: true },
      this.sides[0],
      this.place,
      this.sides[1],
    );
    this.element.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by) return;
      event.preventDefault();
      pick(by);
    });
  }

  /** Show that the message is version `version`, counted from 0, of `versions`. */
  update({ version, versions, isLocked }) {
    const words = `${version + 1}/${versions}`;
    this.element.hidden = versions < 2;
    this.element.setAttribute("aria-label", `Version ${version + 1} of ${versions}`);
    if (this.place.textContent !== words) this.place.textContent = words;
    this.sides[0].disabled = isLocked || version === 0;
    this.sides[1].disabled = isLocked || version === versions - 1;
  }

  focus() {
    this.sides.find(({ disabled }) => !disabled)?.focus();
  }
}

class UserView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.picker = new VersionPicker((by) => actions.showVersion(message, by));
    this.element = h("article", { class: "message user", "aria-label": "You" });
    this.draw();
  }

  draw() {
    const { content, files = [] } = this.message;
    fill(
      this.element,
      files.map(fileView),
      content ? h("div", { class: "bubble" }, content) : null,
      h(
        "div",
        { class: "tools" },
        button("edit", "Edit", () => this.startEdit()),
        copyButton("Copy", () => content),
        this.picker.element,
      ),
    );
  }

  update(state) {
    this.picker.update(state);
  }

  startEdit() {
    const input = h("textarea", {
      rows: Math.min(12, this.message.content.split("\n").length + 1),
      value: this.message.content,
      "aria-label": "Edit the message",
    });
    const save = () => {
      if (input.value.trim() || this.message.files?.length) this.actions.edit(this.message, input.value);
    };
    const cancel = () => {
      this.draw();
      this.element.querySelector("button").focus();
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        save();
      } else if (event.key === "Escape") {
        event.stopPropagation();
        cancel();
      }
    });
    fill(
      this.element,
      h(
        "div",
        { class: "edit" },
        input,
        h(
          "div",
          { class: "row end" },
          h("button", { type: "button", class: "button small ghost", onclick: cancel }, "Cancel"),
          h(
            "button",
            { type: "button", class: "button small primary", onclick: save },
            "Send again",
          ),
        ),
      ),
    );
    input.focus();
  }
}

/** Return a file of a message: an image, or a text that is shown when it is opened. */
function fileView({ name, text, image, tokens }) {
  if (image) {
    const { url: src, width, height } = image;
    return h("img", { class: "picture", src, width, height, alt: name, title: name });
  }
  const size = tokens === null ? null : h("span", { class: "muted" }, tokensInWords(tokens));
  const summary = h("summary", {}, icon("file"), h("span", { class: "name" }, name), size);
  const view = h("details", { class: "file" }, summary);
  const show = () => view.append(codeBlock(text, name.split(".").at(-1)));
  view.addEventListener("toggle", show, { once: true });
  return view;
}

class ResultView {
  constructor(message) {
    const { name, content } = message;
    this.message = message;
    const summary = h("summary", {}, "Result of ", h("code", {}, name));
    this.element = h(
      "article",
      { class: "message result", "aria-label": "Result of a call" },
      h("details", {}, summary, codeBlock(pretty(content))),
    );
  }

  update() {}
}

class AnswerView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.state = { isRunning: false, isLast: false, isLocked: false, version: 0, versions: 1 };
    this.picker = new VersionPicker((by) => actions.showVersion(message, by));
    this.showsTokens = Boolean(message.settings?.logprobs);
    this.thought = h("div", { class: "thought" });
    this.thoughtParts = new LineParts(this.thought);
    this.shownThought = "";
    this.summary = h("summary", {}, "");
    this.reasoning = h("details", { class: "reasoning", hidden: true }, this.summary, this.thought);
    this.text = new MarkdownView();
    this.tokens = new TokensView();
    this.calls = h("div", { class: "calls" });
    this.waiting = h(
      "p",
      { class: "waiting", "aria-hidden": "true" },
      h("span"),
      h("span"),
      h("span"),
    );
    this.loading = h("p", { class: "muted", hidden: true });
    this.foot = h("div", { class: "foot" });
    this.tools = h("div", { class: "tools" });
    this.element = h(
      "article",
      { class: "message answer", "aria-label": "Answer" },
      this.reasoning,
      this.text.element,
      this.tokens.element,
      this.calls,
      this.loading,
      this.waiting,
      this.foot,
      this.tools,
    );
    this.update();
  }

  /**
   * Draw the message as it is now. `isRunning`: more will come. `isLast`: none follows it. The other
   * parts of the state are those of the VersionPicker.
   */
  update(state = this.state) {
    this.state = state;
    const { message } = this;
    const { isRunning, isLast } = state;
    const hasTokens = Boolean(message.logprobs?.length);
    this.reasoning.hidden = !message.reasoning;
    this.drawThought();
    this.summary.textContent =
      isRunning && !message.content && !message.calls.length ? "Thinking…" : "Reasoning";
    this.text.element.hidden = hasTokens && this.showsTokens;
    this.tokens.element.hidden = !this.text.element.hidden;
    if (hasTokens && this.showsTokens) this.tokens.update(message.logprobs);
    else this.text.update(message.content);
    this.loading.hidden = !isRunning || !message.isLoading;
    if (message.isLoading) this.loading.textContent = describeLoading(message);
    this.waiting.hidden = !isRunning || Boolean(message.content || message.calls.length);
    this.element.setAttribute("aria-busy", String(isRunning));
    this.element.classList.toggle("running", isRunning);
    this.drawCalls(isRunning, isLast);
    this.drawFoot(isRunning);
    this.drawTools(isRunning, hasTokens, isLast && canContinue(message));
    this.picker.update(state);
  }

  /** Append what has arrived of the reasoning. */
  drawThought() {
    const { reasoning } = this.message;
    if (!reasoning.startsWith(this.shownThought)) {
      this.thoughtParts.clear();
      this.shownThought = "";
    }
    this.thoughtParts.append(reasoning.slice(this.shownThought.length));
    this.shownThought = reasoning;
  }

  drawCalls(isRunning, isLast) {
    const isAsked = !isRunning && isLast && this.message.finish === "tool_calls";
    const key = JSON.stringify([this.message.calls, isAsked]);
    if (key === this.callsKey) return;
    this.callsKey = key;
    const inputs = [];
    const cards = this.message.calls.map(({ name, args }, place) => {
      const head = h(
        "div",
        { class: "call-head" },
        icon("code"),
        h("span", {}, "Call to ", h("code", {}, name)),
      );
      const card = h("div", { class: "card call" }, head, codeBlock(pretty(args), "arguments"));
      if (isAsked) {
        const id = `result-${this.message.id}-${place}`;
        const input = h("textarea", { id, rows: 2, class: "mono", placeholder: '{"degrees": 7}' });
        inputs.push(input);
        card.append(
          h("div", { class: "field" }, h("label", { for: id }, `What ${name} returns`), input),
        );
      }
      return card;
    });
    const send = h(
      "button",
      {
        type: "button",
        class: "button primary",
        onclick: () => this.actions.answerCalls(inputs.map((input) => input.value)),
      },
      inputs.length > 1 ? "Send the results" : "Send the result",
    );
    fill(this.calls, cards, isAsked ? send : null);
  }

  drawFoot(isRunning) {
    const { message } = this;
    const end = isRunning ? "" : describeEnd(message);
    const notes = [
      end,
      ...(message.warnings ?? []),
      message.ignored ? `Fields without effect: ${message.ignored.join(", ")}` : "",
    ];
    fill(
      this.foot,
      message.error ? errorBox(message.error) : null,
      notes.filter(Boolean).map((note) => h("p", { class: "note" }, note)),
      h("p", { class: "speed" }, describeSpeed(message).join(" · ")),
    );
  }

  drawTools(isRunning, hasTokens, mayGoOn) {
    const key = JSON.stringify([isRunning, hasTokens, this.showsTokens, mayGoOn]);
    if (key === this.toolsKey) return;
    this.toolsKey = key;
    if (isRunning) {
      fill(this.tools);
      return;
    }
    const { message, actions } = this;
    const toggle = () => {
      this.showsTokens = !this.showsTokens;
      this.update();
    };
    fill(
      this.tools,
      this.picker.element,
      mayGoOn ? button("chevron", "Continue", () => actions.goOn()) : null,
      copyButton("Copy", () => message.content),
      button("retry", "Retry", () => actions.retry(message)),
      hasTokens
        ? button("sliders", this.showsTokens ? "Show as text" : "Show tokens", toggle)
        : null,
      copyButton("curl", () => actions.curl(message), {
        title: "Copy this request as a curl command",
      }),
      copyButton("Python", () => actions.python(message), {
        title: "Copy this request as a Python program",
      }),
    );
  }
}

function button(picture, label, onclick) {
  return h(
    "button",
    { type: "button", class: "button small ghost", onclick },
    icon(picture),
    label,
  );
}

/** Return JSON with line breaks; other text as it is. */
export function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
