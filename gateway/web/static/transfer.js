// Writes conversations and presets to a file, and reads such files. It draws nothing.
//
// A file is JSON: { tidegate: 1, conversations: [...], presets: [...] }, without presets if it has
// a single conversation. What is read is checked, because a value of a
// wrong type would break the page at each start. Fields that are not in the tables below are kept.

const FORMAT = 1;
const ROLES = ["user", "assistant", "tool"];

/** Return conversations, and presets if any are given, as the text of a file. */
export function exported(conversations, presets) {
  return JSON.stringify({ tidegate: FORMAT, conversations, presets }, null, 2);
}

/** Return the { conversations, presets } of a file. Raises Error with what is wrong, and where. */
export function readExport(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch (error) {
    throw new Error(`It is not JSON: ${error.message}`, { cause: error });
  }
  if (typeof data?.tidegate !== "number")
    throw new Error("It is not an export of this page: the field “tidegate” is missing.");
  if (data.tidegate !== FORMAT)
    throw new Error(`It has format ${data.tidegate}, and this page reads format ${FORMAT}.`);
  FILE(data, "");
  return { conversations: data.conversations, presets: data.presets ?? [] };
}

// ---- checks: functions (value, path) that raise Error

function kind(words, isRight) {
  return (value, path) => {
    if (!isRight(value)) throw new Error(`${path} must be ${words}.`);
  };
}

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const text = kind("a text", (value) => typeof value === "string");
const number = kind("a number", Number.isFinite);
const truth = kind("true or false", (value) => typeof value === "boolean");
const object = kind("an object", isObject);
const orNull = (check) => (value, path) => value === null || check(value, path);

function list(check) {
  const isList = kind("a list", Array.isArray);
  return (value, path) => {
    isList(value, path);
    value.forEach((item, place) => check(item, `${path}[${place}]`));
  };
}

/** Check an object by the checks of its fields. Those of `optional` may be missing. */
function shape(needed, optional = {}) {
  return (value, path) => {
    object(value, path || "The file");
    for (const [name, check] of Object.entries({ ...needed, ...optional }))
      if (name in needed || value[name] !== undefined)
        check(value[name], path ? `${path}.${name}` : name);
  };
}

const choices = kind("texts, or true or false", (value) =>
  Object.values(value).every((each) => ["string", "boolean"].includes(typeof each)),
);
const settings = (value, path) => {
  object(value, path);
  choices(value, path);
};
const token = shape(
  { token: text, logprob: number },
  { top_logprobs: list(shape({ token: text, logprob: number })) },
);
const picture = shape({
  url: kind("a data: URL of an image", (value) => /^data:image\//.test(value)),
  width: number,
  height: number,
});
const TEXT_FILE = shape({ name: text, text }, { tokens: orNull(number) });
const IMAGE_FILE = shape({ name: text, image: picture });
const file = (value, path) => (value?.image ? IMAGE_FILE : TEXT_FILE)(value, path);
const MESSAGE = shape(
  {
    id: text,
    role: kind(`one of ${ROLES.join(", ")}`, (value) => ROLES.includes(value)),
    content: text,
  },
  {
    ...{ parent: orNull(text), made: number, model: text, settings, name: text, callId: text },
    ...{
      reasoning: text,
      finish: orNull(text),
      requestId: orNull(text),
      error: shape({ message: text }, { help: orNull(text) }),
    },
    ...{ tokens: number, tokensBefore: number, firstMs: number, lastMs: number, tookMs: number },
    ...{ isLoading: truth, hasLoaded: truth, tokenIds: list(number), logprobs: list(token) },
    ...{ warnings: list(text), ignored: list(text) },
    files: list(file),
    calls: list(shape({ id: text, name: text, args: text })),
    usage: shape({ prompt_tokens: number }, { prompt_tokens_details: orNull(object) }),
    timings: shape({}, { predicted_per_second: orNull(number), first_token_ms: orNull(number) }),
  },
);
const PARTS = shape(
  { id: text, title: text, model: text, settings, used: number, messages: list(MESSAGE) },
  { hidden: list(MESSAGE) },
);

function conversation(value, path) {
  PARTS(value, path);
  const { messages, hidden = [] } = value;
  if (!messages.length) throw new Error(`${path}.messages is empty.`);
  const ids = new Set();
  for (const { id } of [...messages, ...hidden]) {
    if (ids.has(id)) throw new Error(`${path} has two messages with the id ${id}.`);
    ids.add(id);
  }
  messages.forEach(({ parent }, place) => {
    const before = messages[place - 1]?.id ?? null;
    if (parent !== undefined && parent !== before)
      throw new Error(`${path}.messages[${place}].parent must be the id of the message before it.`);
  });
  messages.forEach((message, place) => answered(message, `${path}.messages[${place}]`));
  hidden.forEach((message, place) => answered(message, `${path}.hidden[${place}]`));
}

/** Check what an answer cannot be shown without. */
function answered(message, path) {
  if (message.role === "assistant") ANSWER(message, path);
}

const ANSWER = shape({ calls: list(object), reasoning: text, model: text, settings });
const FILE = shape(
  { conversations: list(conversation) },
  { presets: list(shape({ id: text, name: text, settings })) },
);
