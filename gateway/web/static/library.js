// The dialog in which models are downloaded and deleted, if the server and the key allow that.
//
// Downloads belong to the server, which continues them without this page. The page asks for their
// progress once a second while the dialog is open, and once when it is loaded.

import { errorBox, getJson, KEY_CHANGED, request, send } from "./api.js";
import { fill, h, icon, loadStyle } from "./dom.js";
import { chooseModel, fetchModels, MODELS_FETCHED } from "./models.js";

const POLL_MS = 1000;
const MAX_LISTINGS = 10;

/**
 * Add the button "Models" to the bar as soon as it is known that the user may manage models.
 *
 * context  announce(text), and openChat(), which shows the chat
 */
export function offerLibrary(actions, context) {
  let button = null;
  let checkedKeys = 0;
  const check = async () => {
    const own = ++checkedKeys;
    const response = await send("version").catch(() => null);
    const isAllowed = response?.ok && (await response.json()).manages_models === true;
    if (own !== checkedKeys || isAllowed === Boolean(button)) return;
    button?.remove();
    button = null;
    if (!isAllowed) return;
    const label = h("span", {}, "Models");
    const open = () => openLibrary(context, () => showProgress(label, button));
    button = h(
      "button",
      { type: "button", class: "button small ghost models-button", onclick: open },
      icon("download"),
      label,
    );
    actions.prepend(button);
    showProgress(label, button);
  };
  const onFirstModels = () => {
    removeEventListener(MODELS_FETCHED, onFirstModels);
    check();
    addEventListener(KEY_CHANGED, check);
  };
  addEventListener(MODELS_FETCHED, onFirstModels); // the server answers, and has a key if it needs one
}

/** Show in the bar how far a running download is, until there is none. */
async function showProgress(label, button) {
  while (button.isConnected && !document.querySelector("dialog.library")) {
    const library = await getJson("v1/library").catch(() => null);
    const running = library?.models.find((each) => each.download?.total);
    const isBusy = library?.models.some((each) => each.download);
    label.textContent = running ? `Models ${percent(running.download)} %` : "Models";
    if (!isBusy) return;
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

function percent({ completed, total }) {
  return total ? Math.floor((100 * completed) / total) : 0;
}

function inUnits(bytes) {
  if (bytes >= 1e9) return `${(bytes / 1e9).toFixed(1)} GB`;
  return `${Math.max(1, Math.round(bytes / 1e6))} MB`;
}

function inTokens(perSecond) {
  return perSecond >= 10 ? Math.round(perSecond).toLocaleString("en") : perSecond.toFixed(1);
}

/** Fetch the models until they include a served one: its first listing may be a moment late. */
async function fetchUntilListed(name) {
  for (let attempt = 0; attempt < MAX_LISTINGS; attempt += 1) {
    const models = await fetchModels();
    if (models.some(({ id }) => id === name)) return;
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

/** Open the dialog. `onClose` is called after it is closed. */
async function openLibrary(context, onClose) {
  await loadStyle("library.css");
  const dialog = new LibraryDialog(context, onClose);
  dialog.open();
}

class LibraryDialog {
  constructor(context, onClose) {
    this.context = context;
    this.onClose = onClose;
    this.rows = new Map(); // name -> row
    this.summary = h("p", { class: "muted" }, "Loading…");
    this.problem = h("div", {});
    this.fitting = h("ul", { class: "library-list" });
    this.others = h("ul", { class: "library-list" });
    this.othersTitle = h("summary", {});
    this.large = h("details", { hidden: true }, this.othersTitle, this.others);
    this.input = h("input", {
      id: "library-name",
      autocomplete: "off",
      spellcheck: "false",
      placeholder: "owner/repository",
      required: true,
    });
    const close = h("button", { type: "button", class: "button" }, "Close");
    close.addEventListener("click", () => this.dialog.close());
    this.dialog = h(
      "dialog",
      { class: "dialog library", "aria-labelledby": "library-title" },
      h("h2", { id: "library-title" }, "Models"),
      this.summary,
      this.problem,
      this.fitting,
      this.large,
      this.buildForm(),
      h("div", { class: "row end" }, close),
    );
    this.dialog.addEventListener("close", () => {
      clearTimeout(this.timer);
      this.isClosed = true;
      this.dialog.remove();
      this.onClose();
    });
  }

  buildForm() {
    const form = h(
      "form",
      {},
      h("label", { for: "library-name" }, "Another model of the Hugging Face Hub"),
      h(
        "div",
        { class: "row library-other" },
        this.input,
        h("button", { type: "submit", class: "button" }, "Download"),
      ),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const name = this.input.value.trim();
      if (name) this.act(() => this.download(name), () => (this.input.value = ""));
    });
    return form;
  }

  open() {
    document.body.append(this.dialog);
    this.dialog.showModal();
    return this.poll();
  }

  async poll() {
    clearTimeout(this.timer);
    try {
      this.draw(await getJson("v1/library"));
    } catch (error) {
      this.showProblem(error);
    }
    if (!this.isClosed) this.timer = setTimeout(() => this.poll(), POLL_MS);
  }

  showProblem(error) {
    fill(this.problem, error ? errorBox(error) : null);
  }

  /** Run an action, show why it failed, and draw the models again. */
  async act(run, onDone = () => {}) {
    this.showProblem(null);
    try {
      await run();
      onDone();
    } catch (error) {
      this.showProblem(error);
    }
    await this.poll();
  }

  /** Start a download. The server continues it, so its answer is not read to the end. */
  async download(name) {
    const response = await request("api/pull", { body: { model: name } });
    response.body.cancel().catch(() => {});
    this.context.announce(`Downloading ${name}.`);
  }

  async remove(name) {
    await request("api/delete", { method: "DELETE", body: { model: name } });
    await fetchModels();
    this.context.announce(`${name} was deleted.`);
  }

  async chat(name) {
    await fetchUntilListed(name);
    this.dialog.close();
    chooseModel(name);
    this.context.openChat();
  }

  // ---- the list

  draw(library) {
    const memory = library.memory_bytes ? `${inUnits(library.memory_bytes)} of memory, ` : "";
    this.summary.textContent = `This machine has ${memory}${inUnits(library.disk_free_bytes)} of free disk space.`;
    const fits = (model) => model.is_served || model.download || model.fits !== false;
    const names = new Set(library.models.map(({ name }) => name));
    for (const [name, row] of this.rows) {
      if (names.has(name)) continue;
      row.element.remove();
      this.rows.delete(name);
    }
    for (const model of library.models) {
      const row = this.rows.get(model.name) ?? new LibraryRow(this);
      this.rows.set(model.name, row);
      const list = fits(model) ? this.fitting : this.others;
      if (row.element.parentElement !== list) list.append(row.element);
      row.draw(model);
    }
    const numOthers = this.others.children.length;
    this.large.hidden = !numOthers;
    this.othersTitle.textContent = `Too large for this machine (${numOthers})`;
  }
}

/** One model in the list. It is only built again if more than its progress has changed. */
class LibraryRow {
  constructor(dialog) {
    this.dialog = dialog;
    this.element = h("li", { class: "library-row", tabindex: "-1" });
    this.shown = "";
  }

  draw(model) {
    const { download, ...rest } = model;
    const kind = JSON.stringify([rest, Boolean(download), Boolean(download?.total)]);
    if (kind !== this.shown) {
      const wasDownloading = Boolean(this.bar);
      const hadFocus = this.element.contains(document.activeElement);
      this.build(model);
      this.shown = kind;
      if (hadFocus) (this.element.querySelector("button") ?? this.element).focus();
      if (wasDownloading && model.is_served) {
        this.dialog.context.announce(`${model.name} was downloaded.`);
        fetchModels().catch(() => {});
      }
    }
    if (!download) return;
    this.status.textContent = download.total
      ? `${inUnits(download.completed)} of ${inUnits(download.total)}`
      : download.status;
    if (download.total) this.bar.value = download.completed / download.total;
  }

  build(model) {
    const { name } = model;
    const facts = [
      model.download_bytes ? `${inUnits(model.download_bytes)} to download` : "",
      model.needed_bytes ? `about ${inUnits(model.needed_bytes)} of memory` : "",
      model.max_tokens_per_s ? `at most ${inTokens(model.max_tokens_per_s)} tokens/s here (an upper estimate)` : "",
      model.licence,
      model.is_gated ? "terms to accept on its page" : "",
    ];
    this.bar = null;
    fill(
      this.element,
      h(
        "div",
        { class: "library-words" },
        h("strong", {}, name),
        model.is_served ? h("span", { class: "badge good" }, "ready to use") : null,
        model.is_recommended ? h("span", { class: "badge" }, "recommended") : null,
        model.description ? h("div", {}, model.description) : null,
        h("div", { class: "muted" }, facts.filter(Boolean).join(" · ")),
        model.error ? h("div", { class: "library-error" }, model.error) : null,
        model.download ? this.buildProgress(model) : null,
      ),
      h("div", { class: "row library-actions" }, this.buttons(model)),
    );
  }

  buildProgress({ name, download }) {
    this.status = h("span", { class: "muted" });
    // Without a value, the bar shows that something is being done.
    this.bar = h("progress", { max: "1", "aria-label": `Download of ${name}` });
    if (download.total) this.bar.value = 0;
    return h("div", { class: "library-progress" }, this.bar, this.status);
  }

  buttons(model) {
    const { name } = model;
    const button = (label, about, run, kind = "") => {
      let isBusy = false; // a disabled button would lose the focus of the keyboard
      const press = async () => {
        if (isBusy) return;
        isBusy = true;
        await run();
        isBusy = false;
      };
      const element = h(
        "button",
        { type: "button", class: `button small ${kind}`, "aria-label": about, onclick: press },
        label,
      );
      return element;
    };
    const { dialog } = this;
    const remove = () => dialog.act(() => dialog.remove(name));
    if (model.download) return [button("Cancel", `Cancel the download of ${name}`, remove)];
    if (!model.is_served) {
      const start = () => dialog.act(() => dialog.download(name));
      const label = model.error ? "Try again" : "Download";
      return [button(label, `${label}: ${name}`, start, "primary")];
    }
    return [
      button("Chat", `Chat with ${name}`, () => dialog.act(() => dialog.chat(name)), "primary"),
      model.is_deletable ? this.deleteButton(button, name, remove) : null,
    ];
  }

  /** Return a button that deletes the model when it is pressed a second time. */
  deleteButton(button, name, remove) {
    let isAsked = false;
    const element = button(
      "Delete",
      `Delete ${name}`,
      async () => {
        if (isAsked) return remove();
        isAsked = true;
        element.textContent = "Really delete?";
        element.setAttribute("aria-label", `Really delete ${name}?`);
        this.dialog.context.announce(`Press again to delete ${name}.`);
        return undefined;
      },
      "ghost danger",
    );
    return element;
  }
}
