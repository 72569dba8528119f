// Reads the text of a file that the user adds to a message.

const MAX_BYTES = 4_000_000;
const PDF = "%PDF-";

/** Return the text of a File. Raises Error, with a message for the user, if it has none or too much. */
export async function readText(file) {
  const { name } = file;
  if (file.size > MAX_BYTES)
    throw new Error(`${name} has ${megabytes(file.size)}; files may have ${megabytes(MAX_BYTES)}.`);
  const bytes = new Uint8Array(await file.arrayBuffer());
  const isPdf = new TextDecoder("latin1").decode(bytes.subarray(0, PDF.length)) === PDF;
  if (isPdf)
    throw new Error(`${name} is a PDF. Only text files can be added: pdftotext "${name}" makes one.`);
  const text = decoded(bytes);
  if (text === null) throw new Error(`${name} is not a text file.`);
  if (!text.trim()) throw new Error(`${name} is empty.`);
  return text;
}

/** Return the text of bytes in UTF-8, or in UTF-16 with a byte order mark; null: they are no text. */
function decoded(bytes) {
  const mark = `${bytes[0]} ${bytes[1]}`;
  const encoding = { "255 254": "utf-16le", "254 255": "utf-16be" }[mark] ?? "utf-8";
  try {
    const text = new TextDecoder(encoding, { fatal: true }).decode(bytes);
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}

function megabytes(bytes) {
  return `${(bytes / 1e6).toLocaleString("en", { maximumFractionDigits: 1 })} MB`;
}
