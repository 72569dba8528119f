"""Operations -> the OpenAPI document. Pure: the same operations, the same document."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from gateway.http.operation import Operation

OPENAPI = "3.2.0"
TITLE = "Tidegate"
REFERENCES = "#/components/schemas/{name}"
JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
_VARIABLE = re.compile(r"<(?:\w+:)?(\w+)>")
_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
"""Either of them. The server may have no keys; then none is needed."""
_MEANINGS = {
    400: "The request is wrong; `param` names the field, if it is one.",
    401: "No key, or none that is good here.",
    403: "This key may not, or nobody from where this came.",
    404: "There is no such model, or no such thing.",
    405: "Not with this method.",
    409: "Not in this state.",
    413: "The body is too large.",
    415: "The body is no JSON.",
    429: "Too much is waiting; `Retry-After` says when to come back.",
    500: "The server's fault; its log has more under the id that is told.",
    501: "Not on this server.",
    503: "Nothing can be served now; `Retry-After` says when to come back.",
}

Json = dict[str, Any]


def document(operations: Iterable[Operation], version: str) -> Json:
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
    """Flask's `/models/<path:name>` is OpenAPI's `/models/{name}`."""
    return _VARIABLE.sub(r"{\1}", rule)


def _schemas(operations: Sequence[Operation]) -> tuple[dict[Any, Json], Json]:
    """Of every type: its schema, and the components that these refer to."""
    types: dict[Any, None] = {}
    for operation in operations:
        told = [
            *operation.takes,
            *operation.given,
            *operation.errors,
            *operation.otherwise.values(),
        ]
        if operation.streams is not None:
            told.append(operation.streams.chunk)
        types.update(dict.fromkeys(told))
    found, components = msgspec.json.schema_components(types, ref_template=REFERENCES)
    return dict(zip(types, found, strict=True)), dict(components)


def _operation(operation: Operation, schemas: Mapping[Any, Json]) -> Json:
    summary, _, description = operation.about.partition("\n")
    told: Json = {
        "operationId": _identifier(operation),
        "tags": [operation.tag],
        "summary": summary,
        "responses": _responses(operation, schemas),
        "security": [{name: []} for name in _SECURITY],
        "x-scope": operation.scope,
    }
    if operation.scope == "public":
        told["security"] = []
    if description.strip():
        told["description"] = description.strip()
    if operation.parameters:
        told["parameters"] = [
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
        told["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    return told


def _any_of(schemas: Sequence[Json]) -> Json:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _identifier(operation: Operation) -> str:
    words = re.findall(r"\w+", operation.rule.replace("path:", ""))
    return "_".join([operation.method, *words])


def _responses(operation: Operation, schemas: Mapping[Any, Json]) -> Json:
    well: Json = {TEXT: {"schema": {"type": "string"}}}
    if operation.given:
        well = {JSON: {"schema": _any_of([schemas[kind] for kind in operation.given])}}
    about = "The answer."
    if operation.streams is not None:
        end = operation.streams.ends_with
        about += " With `stream`: server-sent events, the data of each a chunk"
        about += f"; the last says `{end}`." if end else "."
        well[EVENTS] = {"itemSchema": _event(operation, schemas)}
    refusals = (400, 403) if operation.scope == "public" else (400, 401, 403)
    told = dict.fromkeys((*operation.statuses, *refusals), operation.errors)
    told |= {status: (kind,) for status, kind in operation.otherwise.items()}
    return {
        "200": {"description": about, "content": well},
        **{
            str(status): {
                "description": _MEANINGS[status],
                "content": {JSON: {"schema": _any_of([schemas[kind] for kind in kinds])}},
            }
            for status, kinds in sorted(told.items())
        },
    }


def _event(operation: Operation, schemas: Mapping[Any, Json]) -> Json:
    """One of a stream's, as OpenAPI 3.2 sees it: fields, of which `data` is text that is JSON."""
    assert operation.streams is not None
    kinds = (operation.streams.chunk, *operation.errors)
    chunk = _any_of([schemas[kind] for kind in kinds])
    data: Json = {"type": "string", "contentMediaType": JSON, "contentSchema": chunk}
    if end := operation.streams.ends_with:
        data = {"anyOf": [{"const": end}, data]}
    return {"type": "object", "required": ["data"], "properties": {"data": data}}
