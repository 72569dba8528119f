// The files that the user adds to the next message: chosen, dropped or pasted. Images are sent as images, and
// all other files as text.

import { getJson } from "./api.js";
import { fill, h, icon, iconButton } from "./dom.js";
import { readText } from "./file-text.js";
import { isImage, readImage } from "./image-file.js";

/** The list of files above the message. Each entry: { name, text, tokens, problem }, or for an image
 * { name, image, problem }, where `image` is a { url, width, height }. `text` and `image` are null while the
 * file is read, and `tokens` until they are counted. `problem`: why the model cannot read it, or "". */
export class Attachments {
  /**
   * model        returns the entry of GET /v1/models that the next message is sent to, or null
   * showProblem  shows an Error; null: there is none
   * onChange     is called when a file was added or removed
   * keep         keeps the files that have been read, as `contentOf` returns them, until they are sent
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
      const { files, types } = event.clipboardData;
      // Office programs copy a picture of the text beside it.
      const isText = types.includes("text/html") && types.includes("text/plain");
      if (!files.length || isText) return;
      event.preventDefault();
      this.add(files);
    });
  }

  /** Read files, and show why some of them cannot be sent. */
  async add(files) {
    this.showProblem(null);
    await Promise.all([...files].map((file) => this.addOne(file)));
  }

  async addOne(file) {
    const entry = isImage(file)
      ? { name: file.name, image: null, problem: "" }
      : { name: file.name, text: null, tokens: null, problem: "" };
    this.entries.push(entry);
    this.draw();
    try {
      if ("image" in entry) entry.image = await readImage(file);
      else entry.text = await readText(file);
    } catch (error) {
      this.remove(entry);
      this.showProblem(error);
      return;
    }
    if (!this.entries.includes(entry)) return; // removed, or another conversation was opened
    this.keepRead();
    await this.check(entry);
  }

  remove(entry) {
    this.entries = this.entries.filter((each) => each !== entry);
    this.keepRead();
    this.draw();
  }

  keepRead() {
    this.keep(this.entries.filter(isRead).map(contentOf));
  }

  /** Show the files that were kept for a conversation. */
  show(files) {
    this.entries = files.map((file) => ({ ...contentOf(file), tokens: null, problem: "" }));
    this.draw();
    this.checkAll();
  }

  /** Check all files again, because another model was chosen, or the first one is known. */
  checkAll() {
    const label = this.model()?.images?.accepted ? "Add files or images" : "Add files";
    this.button.title = label;
    this.button.setAttribute("aria-label", label);
    for (const entry of this.entries) if (isRead(entry)) this.check(entry);
  }

  /** Find out whether the model can read a file. */
  async check(entry) {
    if (!entry.image) return this.count(entry);
    const images = this.model()?.images;
    entry.problem = images?.accepted === false ? `${entry.name} cannot be sent: ${images.why}.` : "";
    this.draw();
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

  /** Return the files to send: [{ name, text, tokens }] or [{ name, image }]. Raises Error if one cannot be
   * sent. */
  ready() {
    for (const entry of this.entries) {
      if (!isRead(entry)) throw new Error(`${entry.name} is still being read.`);
      if (entry.problem) throw new Error(entry.problem);
    }
    return this.entries.map((entry) =>
      entry.image ? contentOf(entry) : { ...contentOf(entry), tokens: entry.tokens },
    );
  }

  draw() {
    fill(
      this.element,
      this.entries.map((entry) =>
        h(
          "li",
          { class: entry.problem ? "file too-long" : "file", title: entry.problem || null },
          entry.image ? h("img", { src: entry.image.url, alt: "" }) : icon("file"),
          h("span", { class: "name" }, entry.name),
          h("span", { class: "muted" }, sizeOf(entry)),
          iconButton("close", `Remove ${entry.name}`, () => this.remove(entry)),
        ),
      ),
    );
    this.onChange();
  }
}

const isRead = ({ text, image }) => Boolean(image) || typeof text === "string";

/** Return what is kept of a file: { name, text } or { name, image }. */
function contentOf({ name, text, image }) {
  return image ? { name, image } : { name, text };
}

function sizeOf(entry) {
  if (!isRead(entry)) return "reading …";
  const { image, tokens, problem } = entry;
  if (image) return problem ? "not read by this model" : `${image.width} × ${image.height}`;
  if (problem && tokens === null) return "too long";
  return tokens === null ? "" : tokensInWords(tokens);
}

/** Return a number of tokens in words. */
export function tokensInWords(tokens) {
  return `${tokens.toLocaleString("en")} token${tokens === 1 ? "" : "s"}`;
}
