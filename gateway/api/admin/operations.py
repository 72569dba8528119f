"""The routes for operators, as their documentation sees them."""

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
_NAME = Parameter("name", "One of the served names.", place="path")
_VERSION = Parameter(
    "anthropic-version", "With it, the answer and its errors have Anthropic's shape.", "header"
)
_LIMIT = {"type": "integer", "minimum": 1, "maximum": 1000}
_PAGE = (
    Parameter("limit", "The most models on a page, in Anthropic's shape.", schema=_LIMIT),
    Parameter("after_id", "The page begins after this model."),
    Parameter("before_id", "The page ends before this model."),
)

OPERATIONS = (
    _public(rule="/livez", about="Whether this process answers at all.", gives=responses.Live),
    _public(
        rule="/startupz",
        about="Whether there has been a model to serve since this process began.",
        gives=responses.Startup,
        statuses=(405, 500),
        otherwise={503: responses.Startup},
    ),
    _public(
        rule="/readyz",
        about="Whether requests can be served now, and if not, why.",
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
    _known(rule="/version", about="The server's version.", gives=responses.Version),
    _get(rule="/metrics", scope="metrics", about="Prometheus metrics.", statuses=(405, 500)),
    _known(rule="/openapi.json", about="This document.", gives=dict[str, Any]),
    _known(
        rule="/v1/models",
        about="The served model, by each of its names.",
        gives=(responses.Models, ModelPage),
        error=(ErrorAnswer, MessagesErrorAnswer),
        statuses=(400, *READING),
        parameters=(_VERSION, *_PAGE),
    ),
    _known(
        rule="/v1/models/<path:name>",
        about="One of them.",
        gives=(responses.ModelEntry, ModelInfo),
        error=(ErrorAnswer, MessagesErrorAnswer),
        parameters=(_NAME, _VERSION),
    ),
)
