"""OpenAPI operations of the operator routes."""

from __future__ import annotations

from functools import partial
from typing import Any

from gateway.api.admin import responses
from gateway.api.anthropic.responses import MessagesErrorAnswer, ModelInfo, ModelPage
from gateway.api.openai.responses import ErrorAnswer
from gateway.http.operation import READING, Operation, Parameter

_get = partial(Operation, method="get", tag="Operators", error=ErrorAnswer, statuses=READING)
_public = partial(_get, scope="public")
_known = partial(_get, scope="inference")
_NAME = Parameter("name", "A served model name.", place="path")
_VERSION = Parameter(
    "anthropic-version", "If set, responses and errors have Anthropic's shape.", "header"
)
_LIMIT = {"type": "integer", "minimum": 1, "maximum": 1000}
_PAGE = (
    Parameter("limit", "Maximum number of models on a page, in Anthropic's shape.", schema=_LIMIT),
    Parameter("after_id", "Return the models after this id."),
    Parameter("before_id", "Return the models before this id."),
)

OPERATIONS = (
    _public(rule="/livez", about="Liveness: this process responds.", gives=responses.Live),
    _public(
        rule="/startupz",
        about="Startup: a model has become available since this process started.",
        gives=responses.Startup,
        statuses=(405, 500),
        otherwise={503: responses.Startup},
    ),
    _public(
        rule="/readyz",
        about="Readiness: requests can be served now; if not, `why` has the reason.",
        gives=responses.ReadinessAnswer,
        statuses=(405, 500),
        otherwise={503: responses.ReadinessAnswer},
    ),
    _public(
        rule="/health",
        about="The same as /readyz.",
        gives=responses.ReadinessAnswer,
        statuses=(405, 500),
        otherwise={503: responses.ReadinessAnswer},
    ),
    _known(rule="/version", about="Return the server's version.", gives=responses.Version),
    _get(rule="/metrics", scope="metrics", about="Prometheus metrics.", statuses=(405, 500)),
    _known(rule="/openapi.json", about="This document.", gives=dict[str, Any]),
    _known(
        rule="/v1/models",
        about="List the served model under each of its names.",
        gives=(responses.Models, ModelPage),
        error=(ErrorAnswer, MessagesErrorAnswer),
        statuses=(400, *READING),
        parameters=(_VERSION, *_PAGE),
    ),
    _known(
        rule="/v1/models/<path:name>",
        about="Describe one served model.",
        gives=(responses.ModelEntry, ModelInfo),
        error=(ErrorAnswer, MessagesErrorAnswer),
        parameters=(_NAME, _VERSION),
    ),
)
