// Builds elements. Text is always set as text, so no function here can turn text into markup.

const SVG = "http://www.w3.org/2000/svg";

/**
 * Return a new element.
 *
 * h("button", { class: "button", onclick: save, "aria-label": "Save" }, icon("save"), "Save")
 *
 * Attributes that are null, undefined or false are left out; true gives an empty attribute.
 * Functions whose name starts with "on" become event listeners. `value`, `checked` and `disabled`
 * are set as properties. Children are nodes, text, arrays of both, or null.
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "disabled") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined),
  );
  return element;
}

/** Replace all children of an element. */
export function fill(element, ...children) {
  element.replaceChildren(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined),
  );
  return element;
}

const ICONS = {
  attach: "M20 11l-8.5 8.5a5 5 0 0 1-7-7L13 4a3.4 3.4 0 0 1 4.8 4.8L9.5 17a1.7 1.7 0 0 1-2.4-2.4L15 7",
  back: "M15 6l-6 6 6 6",
  check: "M5 13l4 4L19 7",
  chevron: "M9 6l6 6-6 6",
  close: "M6 6l12 12M18 6L6 18",
  code: "M8 8l-4 4 4 4M16 8l4 4-4 4",
  compare: "M4 5h6v14H4zM14 5h6v14h-6z",
  copy: "M9 9h10v11H9zM5 15V4h10",
  down: "M12 5v14M6 13l6 6 6-6",
  download: "M12 4v11m0 0l-4-4m4 4l4-4M5 20h14",
  edit: "M4 20h4L19 9l-4-4L4 16z",
  file: "M6 3h8l4 4v14H6zM14 3v4h4M9 12h6M9 16h6",
  key: "M14.5 9.5a4 4 0 1 1-2.2-3.6 4 4 0 0 1 2.2 3.6zM13 12l7 7M17 16l2-2",
  menu: "M4 7h16M4 12h16M4 17h16",
  moon: "M20 14.5A8 8 0 0 1 9.5 4 8 8 0 1 0 20 14.5z",
  plus: "M12 5v14M5 12h14",
  retry: "M20 11a8 8 0 1 0-2.3 5.7M20 4v7h-7",
  send: "M12 19V5M6 11l6-6 6 6",
  sliders: "M4 7h10M18 7h2M4 17h2M10 17h10M16 5v4M8 15v4",
  stop: "M7 7h10v10H7z",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.4 1.4M17.6 17.6L19 19M5 19l1.4-1.4M17.6 6.4L19 5",
  auto: "M12 3a9 9 0 1 0 0 18zM12 3a9 9 0 0 1 0 18",
  upload: "M12 15V4m0 0l-4 4m4-4l4 4M5 20h14",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
};

/** Return a small decorative picture. Its button or link needs a label of its own. */
export function icon(name) {
  const picture = document.createElementNS(SVG, "svg");
  picture.setAttribute("viewBox", "0 0 24 24");
  picture.setAttribute("class", "icon");
  picture.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  picture.append(path);
  return picture;
}

/** Return a button that shows only a picture. `label` is its name and its tooltip. */
export function iconButton(name, label, onclick, attributes = {}) {
  const all = { type: "button", class: "icon-button", "aria-label": label, title: label, onclick };
  return h("button", { ...all, ...attributes }, icon(name));
}

/** Return a button that copies the text that `read` returns, and shows that it has. */
export function copyButton(label, read, attributes = {}) {
  const button = h(
    "button",
    { type: "button", class: "button small ghost", ...attributes },
    icon("copy"),
    label,
  );
  button.addEventListener("click", async () => {
    const done = await copyText(read());
    fill(button, icon(done ? "check" : "copy"), done ? "Copied" : "Not copied");
    setTimeout(() => fill(button, icon("copy"), label), 1500);
  });
  return button;
}

/** Copy text to the clipboard. Return whether it worked. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // The clipboard needs https or localhost. Elsewhere, only the old way works.
    const area = h("textarea", { class: "visually-hidden", value: text });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

/** Offer a text as a file to save. */
export function saveFile(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

/** Load a style sheet of the page, such as "watch.css", and wait until it applies. */
export function loadStyle(name) {
  const address = new URL(name, import.meta.url).href;
  for (const link of document.styleSheets) if (link.href === address) return Promise.resolve();
  return new Promise((resolve, reject) => {
    const failed = () => reject(new Error(`${name} could not be loaded`));
    document.head.append(
      h("link", { rel: "stylesheet", href: address, onload: resolve, onerror: failed }),
    );
  });
}

/** Call `draw` at most once per frame, however often the returned function is called. */
export function oncePerFrame(draw) {
  let frame = null;
  let timer = null;
  const run = () => {
    cancelAnimationFrame(frame);
    clearTimeout(timer); // or it would draw between two of the next frames
    timer = null;
    draw();
  };
  return () => {
    if (timer !== null) return;
    frame = requestAnimationFrame(run);
    timer = setTimeout(run, 250); // A hidden tab has no frames.
  };
}
