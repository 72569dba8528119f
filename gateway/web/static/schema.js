// Reads the JSON schemas of an OpenAPI document: their names in words, their fields, and examples.

import { h } from "./dom.js";

const MAX_EXAMPLE_DEPTH = 6;
const REFERENCE = "#/components/schemas/";

/** Return a sentence whose names in `backticks` are code. */
export function withCode(sentence) {
  return sentence.split(/`([^`]+)`/).map((part, place) => (place % 2 ? h("code", {}, part) : part));
}

/** Return the schema that a reference names; other schemas as they are. */
export function resolve(schema, document) {
  if (!schema?.$ref) return schema ?? {};
  return document.components.schemas[schema.$ref.slice(REFERENCE.length)] ?? {};
}

/** Return a type in words: "number or null", "list of ChatMessage". */
export function typeName(schema = {}) {
  if (schema.$ref) return schema.$ref.slice(REFERENCE.length);
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  const choices = schema.anyOf ?? schema.oneOf;
  if (choices) return [...new Set(choices.map(typeName))].join(" or ");
  if (Array.isArray(schema.type)) return schema.type.join(" or ");
  if (schema.type === "array") return schema.items ? `list of ${typeName(schema.items)}` : "list";
  if (schema.type === "object" && schema.additionalProperties?.type)
    return `object of ${typeName(schema.additionalProperties)}`;
  return schema.type ?? "any value";
}

/** Return the bounds of a value in words: ["0 to 2"], ["at most 128 items"]. */
export function boundsOf(schema = {}) {
  const own = (schema.anyOf ?? schema.oneOf ?? []).flatMap(boundsOf);
  const { minimum, maximum, exclusiveMinimum, exclusiveMaximum } = schema;
  const low = minimum ?? exclusiveMinimum;
  const high = maximum ?? exclusiveMaximum;
  if (low !== undefined && high !== undefined)
    own.push(`${exclusiveMinimum === undefined ? "" : "above "}${number(low)} to ${number(high)}`);
  else if (low !== undefined)
    own.push(`${exclusiveMinimum === undefined ? "at least" : "above"} ${number(low)}`);
  else if (high !== undefined) own.push(`at most ${number(high)}`);
  const sizes = [
    ["minLength", "maxLength", "characters"],
    ["minItems", "maxItems", "items"],
    ["minProperties", "maxProperties", "members"],
  ];
  for (const [least, most, unit] of sizes) {
    if (schema[most] !== undefined)
      own.push(
        `${schema[least] ? `${number(schema[least])} to ` : "at most "}${number(schema[most])} ${unit}`,
      );
    else if (schema[least]) own.push(`at least ${number(schema[least])} ${unit}`);
  }
  if (schema.pattern) own.push(`matches ${schema.pattern}`);
  return own;
}

function number(value) {
  if (Math.abs(value) === 2 ** 63) return value < 0 ? "-2^63" : "2^63 - 1"; // rounded
  return Number.isSafeInteger(value) ? value.toLocaleString("en") : String(value);
}

/** Return the schemas below a type that have fields of their own. */
function partsOf(schema, document) {
  if (schema.$ref) {
    const found = resolve(schema, document);
    return found.properties || found.anyOf || found.oneOf || found.type === "array" ? [schema] : [];
  }
  if (schema.properties) return [schema];
  const inner = [
    ...(schema.anyOf ?? schema.oneOf ?? []),
    ...(schema.type === "array" ? [schema.items ?? {}] : []),
  ];
  if (schema.additionalProperties && schema.additionalProperties !== true)
    inner.push(schema.additionalProperties);
  return inner.flatMap((each) => partsOf(each, document));
}

/**
 * Return an element that shows a schema's fields. Nested types are drawn when they are opened, so
 * recursive ones end.
 */
export function schemaView(schema, document) {
  const found = resolve(schema, document);
  if (found.properties) return fieldsView(found, document);
  const parts = partsOf(found, document);
  if (!parts.length)
    return h("p", { class: "schema-type" }, [typeName(schema), ...boundsOf(found)].join(", "));
  return h(
    "div",
    {},
    parts.map((part) => nested(part, document, parts.length === 1)),
  );
}

function fieldsView(schema, document) {
  const required = new Set(schema.required);
  // The document has the fields in order of importance.
  const rows = Object.entries(schema.properties).map(([name, field]) => {
    const facts = [typeName(field), ...boundsOf(field)];
    if (field.default !== undefined && field.default !== null)
      facts.push(`default ${JSON.stringify(field.default)}`);
    return h(
      "li",
      {},
      h(
        "div",
        { class: "row" },
        h("code", { class: "name" }, name),
        required.has(name) ? h("span", { class: "badge warn" }, "required") : null,
        h("span", { class: "schema-type" }, facts.join(", ")),
      ),
      field.description ? h("p", {}, withCode(field.description)) : null,
      (field.examples ?? []).map((example) =>
        h("p", { class: "example" }, "Example: ", h("code", {}, JSON.stringify(example))),
      ),
      partsOf(field, document).map((part) => nested(part, document)),
    );
  });
  return h(
    "div",
    {},
    schema.description ? h("p", { class: "prose" }, withCode(schema.description)) : null,
    h("ul", { class: "fields" }, rows),
  );
}

/** Return the name of a type, or what tells an object from others: 'object with role "user"'. */
function labelOf(schema) {
  const name = typeName(schema);
  const [field, { const: value, enum: values } = {}] =
    Object.entries(schema.properties ?? {}).find(
      ([, each]) => each.const !== undefined || each.enum,
    ) ?? [];
  return field
    ? `${name} with ${field} ${(values ?? [value]).map((each) => JSON.stringify(each)).join(" or ")}`
    : name;
}

/** Return a folded view of a type, drawn when it is opened. */
function nested(schema, document, isOpen = false) {
  const details = h("details", {}, h("summary", {}, labelOf(schema)));
  const draw = () => {
    if (details.childElementCount === 1) details.append(schemaView(schema, document));
  };
  details.addEventListener("toggle", draw);
  if (isOpen) {
    draw();
    details.open = true;
  }
  return details;
}

/** An example of a request has a field of each group: a required one, or else the first one. */
const USUAL = [
  ...[["model"], ["messages", "input", "prompt"], ["max_output_tokens", "max_tokens"]],
  ...[["text_1"], ["text_2"]],
];

function exampleNames({ properties, required = [] }, hints) {
  const wanted = new Set(required);
  for (const group of USUAL) {
    const first = group.find((name) => name in properties && name in hints);
    if (first && !group.some((name) => wanted.has(name))) wanted.add(first);
  }
  return Object.keys(properties).filter((name) => wanted.has(name));
}

/**
 * Return an example of a schema, with its required fields and a few others. `hints` maps the names
 * of fields to their values, or to functions that get the field's schema; {} for examples of
 * responses.
 */
export function exampleOf(schema, document, hints = {}, depth = 0) {
  const found = resolve(schema, document);
  if (found.const !== undefined) return found.const;
  if (found.enum) return found.enum[0];
  if (found.default !== undefined && found.default !== null && depth > 0) return found.default;
  const choices = found.anyOf ?? found.oneOf;
  if (choices)
    return exampleOf(choices.find(({ type }) => type !== "null") ?? {}, document, hints, depth);
  if (depth > MAX_EXAMPLE_DEPTH) return null;
  if (found.properties) {
    return Object.fromEntries(
      exampleNames(found, hints).map((name) => {
        const hint = hints[name];
        if (hint === undefined)
          return [name, exampleOf(found.properties[name], document, hints, depth + 1)];
        return [name, typeof hint === "function" ? hint(found.properties[name]) : hint];
      }),
    );
  }
  const type = Array.isArray(found.type) ? found.type[0] : found.type;
  if (type === "array")
    return found.items && found.minItems !== 0
      ? [exampleOf(found.items, document, hints, depth + 1)]
      : [];
  const number = Math.max(found.minimum ?? found.exclusiveMinimum ?? 0, 0);
  return (
    { string: "text", integer: number, number, boolean: false, object: {}, null: null }[type] ??
    null
  );
}
