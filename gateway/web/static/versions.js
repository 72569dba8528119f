// The versions of a conversation's messages, which form a tree. It draws nothing.
//
// `messages` is the branch that is shown, from the first message to the last. The prompt, the list and
// the search read nothing else. `hidden` has the messages of all other branches. Each message has the
// id of the one before it as its `parent` (null: it is the first). Messages with the same parent are
// versions of each other, the oldest first.

/** Add a message at the end of the branch that is shown. */
export function append(conversation, message) {
  message.parent = conversation.messages.at(-1)?.id ?? null;
  conversation.messages.push(message);
}

/**
 * Hide a message and those that follow it, so that another version can be added. An answer that has
 * no output, such as a refused one, is dropped: it is no version worth showing.
 */
export function hideFrom(conversation, message) {
  const { messages, hidden } = conversation;
  const removed = messages.splice(messages.indexOf(message));
  if (removed.length === 1 && isEmpty(message)) return;
  hidden.push(...removed);
}

/** Return a message and its other versions, the oldest first. */
export function versionsOf({ messages, hidden }, { parent }) {
  return [...hidden, ...messages]
    .filter((other) => other.parent === parent)
    .sort((a, b) => a.made - b.made);
}

/** Show another version of a message, with what followed it when it was last shown. */
export function show(conversation, version) {
  const { messages, hidden } = conversation;
  hidden.push(...messages.splice(messages.findIndex(({ parent }) => parent === version.parent)));
  for (let next = version; next; next = hidden.findLast(({ parent }) => parent === next.id)) {
    hidden.splice(hidden.indexOf(next), 1);
    messages.push(next);
  }
}

/** Add what a conversation lacks that was stored before there were versions. */
export function adopt(conversation) {
  conversation.hidden ??= [];
  conversation.messages.forEach((message, place, all) => {
    message.parent ??= all[place - 1]?.id ?? null;
    message.made ??= 0;
  });
}

function isEmpty({ role, content, reasoning, calls }) {
  return role === "assistant" && !content && !reasoning && !calls?.length;
}
