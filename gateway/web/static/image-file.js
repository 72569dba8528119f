// Reads an image that the user adds to a message.

const MAX_BYTES = 32 << 20;
const MAX_SIDE = 2048; // no model needs more, and the browser keeps every image of a conversation
const KEPT_BYTES = 1 << 20; // a smaller file of a usual format is sent as it is
const KEPT_TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const DRAWN_TYPE = "image/webp"; // a browser that cannot write it writes PNG
const DRAWN_QUALITY = 0.9;

/** Return whether a File is an image. A drawing in SVG is a text. */
export function isImage({ type }) {
  return type.startsWith("image/") && type !== "image/svg+xml";
}

/**
 * Return an image of a File: { url, width, height }, with a data: URL. A large image is made smaller,
 * and one of another format is converted. Raises Error, with a message for the user, if it cannot be read.
 */
export async function readImage(file) {
  const { name, size, type } = file;
  if (size > MAX_BYTES) throw new Error(`${name} is too large: images may have 32 MiB.`);
  const picture = await createImageBitmap(file).catch(() => null);
  if (!picture) throw new Error(`${name} cannot be read as an image.`);
  try {
    const scale = Math.min(1, MAX_SIDE / Math.max(picture.width, picture.height));
    const isKept = scale === 1 && size <= KEPT_BYTES && KEPT_TYPES.includes(type);
    const [width, height] = [picture.width, picture.height].map((side) =>
      Math.max(1, Math.round(side * scale)),
    );
    const blob = isKept ? file : await drawn(picture, width, height);
    if (!blob) throw new Error(`${name} cannot be made smaller by this browser.`);
    return { url: await dataUrl(blob), width, height };
  } finally {
    picture.close();
  }
}

/** Return a Blob of a picture in another size; null if the browser has no memory for it. */
function drawn(picture, width, height) {
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  canvas.getContext("2d").drawImage(picture, 0, 0, width, height);
  return new Promise((resolve) => canvas.toBlob(resolve, DRAWN_TYPE, DRAWN_QUALITY));
}

function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}
