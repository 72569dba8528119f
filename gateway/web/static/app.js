// The frame of the page: the tabs, the theme, the dialogs for the key and the shortcuts.
//
// Each tab is a module of its own, which is loaded when the tab is first opened:
//
//   // watch.js
//   import { getJson, streamEvents, errorBox } from "./api.js";
//   import { h, fill, loadStyle } from "./dom.js";
//
//   export async function mount(root, context) {
//     await loadStyle("watch.css");
//     fill(root, h("h1", {}, "Watch"));
//     return () => { ... };  // called when another tab is opened: end streams and timers here
//   }
//
// `root` is an empty element that fills the page below the bar. `context` has:
//
//   path            what follows the tab in the address: "r-17" for /#watch/r-17
//   setPath(path)   changes that part of the address
//   announce(text)  makes screen readers say a text
//
// A tab may also return an object { unmount, onPath(path) } instead of a function. Then `onPath` is
// called when the user changes the address, in place of a new mount.
//
// style.css lists the colours and the classes that all tabs share.

import { KEY_CHANGED, onKeyNeeded, storeKey, storedKey } from "./api.js";
import { fill, h, icon, iconButton } from "./dom.js";
import { offerLibrary } from "./library.js";
import { SHORTCUTS } from "./shortcuts.js";

const TABS = [
  { id: "chat", label: "Chat", module: "./chat.js" },
  { id: "compare", label: "Compare", module: "./compare.js" },
  { id: "watch", label: "Watch", module: "./watch.js" },
  { id: "docs", label: "Reference", module: "./docs.js" },
];
const HOME = new URL("../", import.meta.url);
const main = document.getElementById("main");
const announcer = document.getElementById("announcer");
let current = null; // { id, unmount, onPath }
let visit = 0;

// ---- addresses: /#chat/ID, /#compare, /#watch/ID and /reference#OPERATION

function addressOf(id, path = "") {
  if (id === "docs") return new URL(path ? `reference#${path}` : "reference", HOME);
  return new URL(path ? `#${id}/${path}` : `#${id}`, HOME);
}

function place() {
  const fragment = decodeURIComponent(location.hash.slice(1));
  if (location.pathname.endsWith("/reference")) return { id: "docs", path: fragment };
  const [id, ...rest] = fragment.split("/");
  return TABS.some((tab) => tab.id === id && id !== "docs")
    ? { id, path: rest.join("/") }
    : { id: "chat", path: "" };
}

async function show() {
  const { id, path } = place();
  for (const link of document.querySelectorAll("#tabs a")) {
    if (link.dataset.tab === id) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (current?.id === id) {
    if (current.onPath) return current.onPath(path);
    if (current.path === path) return undefined;
  }
  const own = ++visit;
  current?.unmount?.();
  const tab = TABS.find((each) => each.id === id);
  current = { id, path };
  document.title = `${tab.label} · Tidegate`;
  const root = h("div", { class: `tab ${id}` });
  fill(main, root);
  const context = {
    path,
    announce,
    setPath: (next) => {
      if (current?.id !== id) return;
      current.path = next;
      history.replaceState(null, "", addressOf(id, next));
    },
  };
  try {
    const { mount } = await import(tab.module);
    if (own !== visit) return undefined;
    const mounted = await mount(root, context);
    const hooks = typeof mounted === "function" ? { unmount: mounted } : mounted;
    if (own === visit) Object.assign(current, hooks);
    else hooks?.unmount?.();
  } catch (error) {
    console.error(error);
    fill(
      root,
      h(
        "div",
        { class: "notice bad", role: "alert" },
        `${tab.label} could not be shown: ${error.message}`,
      ),
    );
  }
  return undefined;
}

function announce(text) {
  announcer.textContent = "";
  setTimeout(() => (announcer.textContent = text), 50); // a change of an empty region is announced
}

function onLink(event) {
  const link = event.target.closest("a[href]");
  const isPlain =
    event.button === 0 && !(event.ctrlKey || event.metaKey || event.shiftKey || event.altKey);
  if (!link || link.target || link.hasAttribute("download") || !isPlain) return;
  const to = new URL(link.href);
  if (link.classList.contains("skip")) {
    event.preventDefault();
    main.focus();
  } else if (
    to.origin === location.origin &&
    (to.pathname === HOME.pathname || to.pathname === addressOf("docs").pathname)
  ) {
    event.preventDefault();
    if (to.href !== location.href) history.pushState(null, "", to);
    show();
  }
}

// ---- theme

const THEMES = { auto: "Theme: system", light: "Theme: light", dark: "Theme: dark" };

function themeButton() {
  const button = iconButton("auto", "", () => {
    const names = Object.keys(THEMES);
    const next = names[(names.indexOf(button.dataset.theme) + 1) % names.length];
    if (next === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    try {
      if (next === "auto") localStorage.removeItem("tidegate.theme");
      else localStorage.setItem("tidegate.theme", next);
    } catch {
      // Storage is disabled: the choice lasts until the page is loaded again.
    }
    draw(next);
    announce(THEMES[next]);
  });
  const draw = (theme) => {
    button.dataset.theme = theme;
    button.title = THEMES[theme];
    button.setAttribute("aria-label", THEMES[theme]);
    fill(button, icon({ auto: "auto", light: "sun", dark: "moon" }[theme]));
  };
  draw(document.documentElement.dataset.theme ?? "auto");
  return button;
}

// ---- the key

/** Ask for a key, and say why the last one was refused. Return null if the user has cancelled. */
function askForKey(problem) {
  const input = h("input", {
    type: "password",
    id: "key-input",
    autocomplete: "off",
    spellcheck: "false",
    required: true,
  });
  const cancel = h("button", { type: "button", class: "button ghost" }, "Cancel");
  const form = h(
    "form",
    {},
    h("h2", { id: "key-title" }, "API key"),
    problem
      ? h("p", { class: "notice bad", role: "alert" }, `The server refused the key: ${problem}`)
      : null,
    h(
      "p",
      {},
      "This server requires a key. Its operator makes one with ",
      h("code", {}, "tidegate keys add"),
      ".",
    ),
    h("label", { for: "key-input" }, "Key"),
    input,
    h(
      "p",
      { class: "muted" },
      "The key stays in this browser tab (sessionStorage) until you close it. ",
      "It is sent only to this server, in a header, never in an address.",
    ),
    h(
      "div",
      { class: "row end" },
      cancel,
      h("button", { type: "submit", class: "button primary" }, "Use this key"),
    ),
  );
  const dialog = h("dialog", { class: "dialog", "aria-labelledby": "key-title" }, form);
  return new Promise((resolve) => {
    let key = null;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      key = input.value.trim();
      if (key) dialog.close();
    });
    cancel.addEventListener("click", () => dialog.close());
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(key);
    });
    document.body.append(dialog);
    dialog.showModal();
    input.focus();
  });
}

function keyButton() {
  const button = iconButton("key", "", async () => {
    if (storedKey()) {
      storeKey("");
      announce("The key was removed from this tab.");
    } else {
      const key = await askForKey("");
      if (key !== null) storeKey(key);
    }
  });
  const draw = () => {
    const label = storedKey() ? "Forget the API key" : "Enter an API key";
    button.title = label;
    button.setAttribute("aria-label", label);
    button.classList.toggle("on", Boolean(storedKey()));
  };
  addEventListener(KEY_CHANGED, draw);
  draw();
  return button;
}

// ---- shortcuts

function showShortcuts() {
  const rows = SHORTCUTS.map(({ keys, about, isEither }) =>
    h(
      "tr",
      {},
      h(
        "td",
        {},
        keys.map((key, place) => [place ? (isEither ? " or " : " + ") : null, h("kbd", {}, key)]),
      ),
      h("td", {}, about),
    ),
  );
  const close = h("button", { type: "button", class: "button" }, "Close");
  const dialog = h(
    "dialog",
    { class: "dialog", "aria-labelledby": "shortcuts-title" },
    h("h2", { id: "shortcuts-title" }, "Keyboard"),
    h("table", { class: "plain" }, h("tbody", {}, rows)),
    h("div", { class: "row end" }, close),
  );
  close.addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

// ---- start

document
  .getElementById("tabs")
  .append(
    ...TABS.map(({ id, label }) => h("a", { href: addressOf(id).href, "data-tab": id }, label)),
    h("a", { href: new URL("docs/", HOME).href }, "Guide"),
  );
document.getElementById("actions").append(
  keyButton(),
  themeButton(),
  h(
    "button",
    {
      type: "button",
      class: "icon-button shortcuts",
      "aria-label": "Keyboard shortcuts",
      title: "Keyboard shortcuts (Alt + /)",
      onclick: showShortcuts,
    },
    "?",
  ),
);
offerLibrary(document.getElementById("actions"), {
  announce,
  openChat: () => {
    if (place().id === "chat") return;
    history.pushState(null, "", addressOf("chat"));
    show();
  },
});
onKeyNeeded(askForKey);
document.addEventListener("click", onLink);
document.addEventListener("keydown", (event) => {
  if (event.altKey && event.code === "Slash") {
    event.preventDefault();
    showShortcuts();
  }
});
addEventListener("popstate", show);
addEventListener("hashchange", show);
show();
