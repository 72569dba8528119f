// The keyboard shortcuts, as the dialog lists them. chat.js and app.js implement them.

export const SHORTCUTS = [
  { keys: ["Enter"], about: "Send the message" },
  { keys: ["Shift", "Enter"], about: "Begin a new line" },
  { keys: ["Esc"], about: "Stop the answer" },
  { keys: ["↑"], about: "In an empty message: edit the last one" },
  { keys: ["Alt", "N"], about: "Start a new conversation" },
  { keys: ["Alt", "K"], about: "Search the conversations" },
  { keys: ["Alt", "R"], about: "Generate the last answer again" },
  { keys: ["Alt", ", or ."], about: "Show the previous or the next version of the last answer" },
  { keys: ["Alt", "S"], about: "Show or hide the settings" },
  { keys: ["←", "→"], isEither: true, about: "In an answer's tokens: go to the next token" },
  { keys: ["Alt", "/"], about: "Show this list" },
];
