// Keeps the end of a conversation in sight while it grows, until the user scrolls up.

import { iconButton } from "./dom.js";

const NEAR_END_PX = 80;

export class ThreadScroll {
  /** `thread` scrolls. The listeners end with `signal`. */
  constructor(thread, signal) {
    this.thread = thread;
    this.follows = true;
    this.scrolledTo = 0;
    this.button = iconButton("down", "Scroll to the end", () => this.toEnd(), {
      class: "icon-button to-end",
      hidden: true,
    });
    this.sizes = new ResizeObserver(() => (this.follows ? this.toEnd() : this.onScroll()));
    thread.addEventListener("scroll", () => this.onScroll(), { signal });
    // What the user opens should not move out of sight.
    thread.addEventListener("click", (event) => (this.follows &&= !isSummary(event)), { signal });
    signal.addEventListener("abort", () => this.sizes.disconnect());
  }

  /** Follow the sizes of these children of the thread, instead of those given before. */
  observe(elements) {
    this.sizes.disconnect();
    for (const element of elements) this.sizes.observe(element);
  }

  toEnd() {
    this.follows = true;
    this.thread.scrollTop = this.thread.scrollHeight;
  }

  /** Scroll to a message, and follow the end only if it is in sight then. */
  show(element, block) {
    element.scrollIntoView({ block });
    this.follows = this.isNearEnd; // the event of the scroll comes too late
  }

  get isNearEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.thread;
    return scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
  }

  /** The end is also further away if the thread has grown since it was scrolled. */
  onScroll() {
    const { scrollTop } = this.thread;
    if (this.isNearEnd) this.follows = true;
    else if (scrollTop < this.scrolledTo) this.follows = false;
    this.scrolledTo = scrollTop;
    this.button.hidden = this.follows;
  }
}

function isSummary({ target }) {
  return target.closest("summary") !== null;
}
