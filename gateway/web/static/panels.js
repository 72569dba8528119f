// The panels beside the thread: the list of conversations and the settings.

/** From this width on, the settings stand beside the thread; below it, panels lie over the thread. */
const WIDE = matchMedia("(min-width: 1100px)");

export class Panels {
  /**
   * root     gets the class "NAME-open" while the panel NAME is open
   * panels   name -> { element, button }, where `button` opens and closes the panel
   * signal   ends the listener
   */
  constructor(root, panels, signal) {
    this.root = root;
    this.panels = panels;
    WIDE.addEventListener("change", () => this.close(), { signal });
  }

  /** Show or hide a panel. It gets the focus. */
  toggle(name, isOpen = !this.root.classList.contains(`${name}-open`)) {
    this.root.classList.toggle(`${name}-open`, isOpen);
    const { element, button } = this.panels[name];
    button.setAttribute("aria-expanded", String(isOpen));
    if (isOpen) element.querySelector("button, input, textarea, select")?.focus();
    else if (element.contains(document.activeElement)) button.focus();
  }

  /** Close all panels; with `onlyOver`, only if they lie over the thread. */
  close({ onlyOver = false } = {}) {
    for (const name of Object.keys(this.panels))
      if (!onlyOver || !WIDE.matches) this.toggle(name, false);
  }
}
