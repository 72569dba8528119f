// The files that the user adds to the next message: chosen, dropped or pasted. They are sent as text.

import { getJson } from "./api.js";
import { fill, h, icon, iconButton } from "./dom.js";
import { readText } from "./file-text.js";

/** The list of files above the message. Each entry: { name, text, tokens, problem }; `text` is null while
 * the file is read, and `tokens` until they are counted. `problem`: why the model cannot read it, or "". */
export class Attachments {
  /**
   * model        returns the entry of GET /v1/models that the next message is sent to, or null
   * showProblem  shows an Error; null: there is none
   * onChange     is called when a file was added or removed
   * keep         keeps the files that have been read, [{ name, text }], until they are sent
   */
  constructor({ model, showProblem, onChange, keep }) {
    this.model = model;
    this.showProblem = showProblem;
    this.onChange = onChange;
    this.keep = keep;
    this.entries = [];
    this.chooser = h("input", {
      type: "file",
      multiple: true,
      hidden: true,
      "aria-label": "Files to add",
      onchange: () => {
        this.add(this.chooser.files);
        this.chooser.value = ""; // so that the same file can be chosen again
      },
    });
    this.button = iconButton("attach", "Add files", () => this.chooser.click());
    this.element = h("ul", { class: "files", "aria-label": "Files of this message" });
  }

  /** Let files be dropped onto `area` and pasted into `input`. */
  listen(area, input, signal) {
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
    const on = (target, name, run) => target.addEventListener(name, run, { signal });
    on(area, "dragover", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      area.classList.add("dropping");
    });
    on(area, "dragleave", (event) => {
      if (!area.contains(event.relatedTarget)) area.classList.remove("dropping");
    });
    on(area, "drop", (event) => {
      area.classList.remove("dropping");
      if (!hasFiles(event)) return;
      event.preventDefault();
      this.add(event.dataTransfer.files);
    });
    on(input, "paste", (event) => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      this.add(event.clipboardData.files);
    });
  }

  /** Read files, and show why some of them cannot be sent. */
  async add(files) {
    this.showProblem(null);
    await Promise.all([...files].map((file) => this.addOne(file)));
  }

  async addOne(file) {
    const entry = { name: file.name, text: null, tokens: null, problem: "" };
    this.entries.push(entry);
    this.draw();
    try {
      entry.text = await readText(file);
    } catch (error) {
      this.remove(entry);
      this.showProblem(error);
      return;
    }
    if (!this.entries.includes(entry)) return; // removed, or another conversation was opened
    this.keepRead();
    await this.count(entry);
  }

  remove(entry) {
    this.entries = this.entries.filter((each) => each !== entry);
    this.keepRead();
    this.draw();
  }

  keepRead() {
    const read = this.entries.filter(({ text }) => text !== null);
    this.keep(read.map(({ name, text }) => ({ name, text })));
  }

  /** Show the files that were kept for a conversation, [{ name, text }]. */
  show(files) {
    this.entries = files.map(({ name, text }) => ({ name, text, tokens: null, problem: "" }));
    this.draw();
    this.recount();
  }

  /** Count the tokens of all files again, because another model was chosen, or the first one is known. */
  recount() {
    for (const entry of this.entries) if (entry.text !== null) this.count(entry);
  }

  /** Count the tokens of a file, and find out whether the model's context has room for them. */
  async count(entry) {
    const model = this.model();
    Object.assign(entry, { tokens: null, problem: "" });
    this.draw();
    if (!model) return;
    const found = await this.counted(entry, model);
    if (this.model()?.id !== model.id) return; // another count has begun
    Object.assign(entry, found);
    this.draw();
  }

  async counted({ name, text }, { id, max_model_len: limit }) {
    const body = { model: id, prompt: text, add_special_tokens: false };
    try {
      const { count: tokens } = await getJson("tokenize", { method: "POST", body });
      const sizes = `${tokensInWords(tokens)}, but the context of ${id} has ${tokensInWords(limit)}`;
      return { tokens, problem: tokens < limit ? "" : `${name} has ${sizes}.` };
    } catch (error) {
      // The server does not count the tokens of a text that is much too long.
      if (error.status === 400) return { problem: `${name}: ${error.message}` };
      this.showProblem(error);
      return {};
    }
  }

  /** Return the files to send: [{ name, text, tokens }]. Raises Error if one cannot be sent. */
  ready() {
    for (const { name, text, problem } of this.entries) {
      if (text === null) throw new Error(`${name} is still being read.`);
      if (problem) throw new Error(problem);
    }
    return this.entries.map(({ name, text, tokens }) => ({ name, text, tokens }));
  }

  draw() {
    fill(
      this.element,
      this.entries.map((entry) =>
        h(
          "li",
          { class: entry.problem ? "file too-long" : "file", title: entry.problem || null },
          icon("file"),
          h("span", { class: "name" }, entry.name),
          h("span", { class: "muted" }, sizeOf(entry)),
          iconButton("close", `Remove ${entry.name}`, () => this.remove(entry)),
        ),
      ),
    );
    this.onChange();
  }
}

function sizeOf({ text, tokens, problem }) {
  if (text === null) return "reading …";
  if (problem && tokens === null) return "too long";
  return tokens === null ? "" : tokensInWords(tokens);
}

/** Return a number of tokens in words. */
export function tokensInWords(tokens) {
  return `${tokens.toLocaleString("en")} token${tokens === 1 ? "" : "s"}`;
}
