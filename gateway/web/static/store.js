// Keeps conversations in the browser (IndexedDB). Nothing is sent to the server.
//
// At most MAX_CONVERSATIONS and MAX_BYTES are kept: the ones that were used least recently are
// deleted. If the browser has no IndexedDB, as in some private windows, conversations last until
// the page is closed.

const DRAFTS = "tidegate.drafts";
const DRAFT_FILES = "tidegate.draft-files"; // apart from the texts, because they may not fit
const draftFiles = new Map(); // id of a conversation -> its files, while the page is open
const NAME = "tidegate";
const STORE = "conversations";
export const MAX_CONVERSATIONS = 1000;
export const MAX_BYTES = 50_000_000;
const BATCH = 50; // conversations that are read at once, so that the page can draw in between

export class ConversationStore {
  constructor() {
    this.database = null;
    /** Whether conversations survive a reload of the page. */
    this.isLasting = false;
    this.sizes = new Map(); // id -> { id, used, bytes }
  }

  /** Open the database. Return all conversations, the last used first. */
  async open() {
    try {
      const opening = indexedDB.open(NAME, 1);
      opening.onupgradeneeded = () => opening.result.createObjectStore(STORE, { keyPath: "id" });
      this.database = await done(opening);
      const found = await this.readAll();
      this.isLasting = true;
      for (const { id, used, bytes } of found) this.sizes.set(id, { id, used, bytes });
      return found.map(({ conversation }) => conversation).sort((a, b) => b.used - a.used);
    } catch {
      return [];
    }
  }

  async readAll() {
    const table = this.table("readonly");
    const found = [];
    for (let range = null; ; range = IDBKeyRange.lowerBound(found.at(-1).id, true)) {
      const batch = await done(table.getAll(range, BATCH));
      found.push(...batch);
      if (batch.length < BATCH) return found;
    }
  }

  /** Keep a conversation as it is now. Return the ids of those that were deleted to make room. */
  async save(conversation) {
    return this.saveAll([conversation], conversation.id);
  }

  /** Do so with several. `kept` is the id of the one that is not deleted to make room, if any. */
  async saveAll(conversations, kept = null) {
    if (!this.isLasting) return [];
    const entries = conversations.map((conversation) => {
      const text = JSON.stringify(conversation);
      const size = { id: conversation.id, used: conversation.used, bytes: text.length };
      this.sizes.set(size.id, size);
      return { ...size, conversation: JSON.parse(text) };
    });
    const table = this.table("readwrite");
    await Promise.all(entries.map((entry) => done(table.put(entry))));
    const removed = surplus([...this.sizes.values()], kept);
    for (const id of removed) await this.remove(id);
    return removed;
  }

  async remove(id) {
    this.sizes.delete(id);
    if (this.isLasting) await done(this.table("readwrite").delete(id));
  }

  table(mode) {
    return this.database.transaction(STORE, mode).objectStore(STORE);
  }
}

/** Return what was prepared in this browser tab for a conversation, but not sent: its text, and its files
 * as [{ name, text }] or [{ name, image }]. */
export function readDraft(id) {
  return { text: readKept(DRAFTS)[id] ?? "", files: draftFiles.get(id) ?? readKept(DRAFT_FILES)[id] ?? [] };
}

/** Keep a text that is not sent yet for a reload of the page; "": forget it. */
export function writeDraft(id, text) {
  keep(DRAFTS, id, text || null);
}

/** Keep files that are not sent yet: for a reload, if the browser's storage has room for them. */
export function writeDraftFiles(id, files) {
  draftFiles.set(id, files);
  keep(DRAFT_FILES, id, files.length ? files : null);
}

export function forgetDraft(id) {
  writeDraft(id, "");
  writeDraftFiles(id, []);
}

/** Keep a value under a name of this browser tab and an id; null: forget it. */
function keep(name, id, value) {
  const kept = readKept(name);
  delete kept[id];
  try {
    write(name, value === null ? kept : { ...kept, [id]: value });
  } catch {
    // Storage is full: the value is lost when the page is loaded again. An older one must not come back.
    try {
      write(name, kept);
    } catch {
      // Storage is disabled: nothing is kept.
    }
  }
}

function write(name, kept) {
  if (Object.keys(kept).length) sessionStorage.setItem(name, JSON.stringify(kept));
  else sessionStorage.removeItem(name);
}

function readKept(name) {
  try {
    return JSON.parse(sessionStorage.getItem(name)) ?? {};
  } catch {
    return {};
  }
}

/** Return the ids of the entries to delete for the others to fit the limits. `kept` stays. */
export function surplus(entries, kept) {
  const removed = [];
  let bytes = 0;
  let count = 0;
  for (const { id, bytes: own } of [...entries].sort((a, b) => b.used - a.used)) {
    bytes += own;
    count += 1;
    if (id !== kept && (count > MAX_CONVERSATIONS || bytes > MAX_BYTES)) removed.push(id);
  }
  return removed;
}

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
