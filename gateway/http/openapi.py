"""Builds the OpenAPI document from the operations of all routes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from gateway.http.field_docs import describe, sort_fields
from gateway.http.route import Operation, Stream

OPENAPI = "3.2.0"
TITLE = "Tidegate"
REFERENCES = "#/components/schemas/{name}"
JSON = "application/json"
EVENTS, LINES = "text/event-stream", "application/x-ndjson"
_VARIABLE = re.compile(r"<(?:\w+:)?(\w+)>")
_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
"""The two ways of sending an API key. Either one is enough. A server without keys requires none."""
_MEANINGS = {
    400: "The request is invalid. `param` names the field, if one is at fault.",
    401: "The API key is missing or invalid.",
    403: "The API key lacks the scope, or the host or origin is not allowed.",
    404: "The model or resource does not exist.",
    405: "The method is not allowed on this path.",
    408: "The body did not arrive in time.",
    409: "The resource's current state does not allow this.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "The server is overloaded or a limit is reached. Retry after `Retry-After` seconds.",
    500: "Internal server error. The server's log has details under the id in the message.",
    501: "This server does not support the operation.",
    502: "A model could not be downloaded.",
    503: "The server cannot serve requests now. Retry after `Retry-After` seconds.",
    507: "The disk is too small for the model.",
}
"""Status -> its description in the document."""

Json = dict[str, Any]


def document(operations: Iterable[Operation], version: str) -> Json:
    """Return the OpenAPI document of a server with these operations and this version."""
    operations = sorted(operations, key=lambda operation: (operation.rule, operation.method))
    schemas, components = _schemas(operations)
    paths: dict[str, Json] = {}
    for operation in operations:
        path = paths.setdefault(path_of(operation.rule), {})
        path[operation.method] = _operation(operation, schemas)
    return {
        "openapi": OPENAPI,
        "info": {"title": TITLE, "version": version, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": _SECURITY},
        "tags": [{"name": tag} for tag in sorted({operation.tag for operation in operations})],
    }


def path_of(rule: str) -> str:
    """Return a Flask rule as OpenAPI writes it: `/models/{name}` for `/models/<path:name>`."""
    return _VARIABLE.sub(r"{\1}", rule)


def _schemas(operations: Sequence[Operation]) -> tuple[dict[Any, Json], Json]:
    """Return the schema of every type in `operations`, and the components they refer to."""
    types: dict[Any, None] = {}
    for operation in operations:
        used = [
            *operation.takes,
            *operation.given,
            *operation.errors,
            *operation.otherwise.values(),
        ]
        if operation.streams is not None:
            used += operation.streams.chunks
        types.update(dict.fromkeys(used))
    found, components = msgspec.json.schema_components(types, ref_template=REFERENCES)
    components = dict(components)
    describe(components, types)
    sort_fields(components, [body for operation in operations for body in operation.takes])
    return dict(zip(types, found, strict=True)), components


def _operation(operation: Operation, schemas: Mapping[Any, Json]) -> Json:
    summary, _, description = operation.about.partition("\n")
    entry: Json = {
        "operationId": operation_id(operation),
        "tags": [operation.tag],
        "summary": summary,
        "responses": _responses(operation, schemas),
        "security": [{name: []} for name in _SECURITY],
        "x-scope": operation.scope,
    }
    if operation.scope == "public":
        entry["security"] = []
    if description.strip():
        entry["description"] = description.strip()
    if operation.parameters:
        entry["parameters"] = [
            {
                "name": parameter.name,
                "in": parameter.place,
                "required": parameter.place == "path",
                "description": parameter.about,
                "schema": parameter.schema,
            }
            for parameter in operation.parameters
        ]
    if operation.takes:
        schema = _any_of([schemas[body] for body in operation.takes])
        entry["requestBody"] = {
            "required": True,
            "content": {operation.takes_type: {"schema": schema}},
        }
    return entry


def _any_of(schemas: Sequence[Json]) -> Json:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def operation_id(operation: Operation) -> str:
    """Return the operation's unique id, such as `get_v1_models_name`. `/docs/` is `get_docs_index`,
    since `/docs` is an operation of its own."""
    words = re.findall(r"\w+", operation.rule.replace("path:", ""))
    if words and operation.rule.endswith("/"):
        words.append("index")
    return "_".join([operation.method, *words])


def _responses(operation: Operation, schemas: Mapping[Any, Json]) -> Json:
    """Return the descriptions of all responses, by status."""
    content: Json = {kind: {"schema": {"type": "string"}} for kind in operation.text_types}
    if operation.given:
        content = {JSON: {"schema": _any_of([schemas[kind] for kind in operation.given])}}
    about = "The response."
    if operation.streams is not None:
        about += _about_stream(operation.streams)
        items = [schemas[kind] for kind in (*operation.streams.chunks, *operation.errors)]
        if operation.streams.is_lines:
            content[LINES] = {"itemSchema": _any_of(items)}
        else:
            content[EVENTS] = {"itemSchema": _event(items, operation.streams.ends_with)}
    refusals = (400, 403) if operation.scope == "public" else (400, 401, 403)
    bodies = dict.fromkeys((*operation.statuses, *refusals), operation.errors)
    bodies |= {status: (kind,) for status, kind in operation.otherwise.items()}
    return {
        "200": {"description": about, "content": content},
        **{
            str(status): {
                "description": _MEANINGS[status],
                "content": {JSON: {"schema": _any_of([schemas[kind] for kind in kinds])}},
            }
            for status, kinds in sorted(bodies.items())
        },
    }


def _about_stream(stream: Stream) -> str:
    if stream.is_lines:
        return " Streamed unless `stream` is false: one JSON object per line."
    about = " With `stream`: server-sent events, each with a chunk as its data"
    end = stream.ends_with
    return about + (f"; the data of the last one is `{end}`." if end else ".")


def _event(items: Sequence[Json], end: str) -> Json:
    """Return the schema of a stream's event, as OpenAPI 3.2 writes it. The event's `data` is a
    string that contains JSON. `end` is the data of the last event, if that is not JSON."""
    chunk = _any_of(items)
    data: Json = {"type": "string", "contentMediaType": JSON, "contentSchema": chunk}
    if end:
        data = {"anyOf": [{"const": end}, data]}
    return {"type": "object", "required": ["data"], "properties": {"data": data}}
