"""The route /infill."""

from __future__ import annotations

from functools import partial
from typing import Any

from flask import Response, request

from gateway.api.infill.requests import InfillBody, request_path
from gateway.api.infill.responses import (
    InfillAnswer,
    InfillChunk,
    InfillEnvelope,
    InfillStream,
    whole_infill,
)
from gateway.api.openai.checks import check_completion
from gateway.api.openai.field_paths import ignored_fields, translate_errors
from gateway.api.openai.prepare import Completion
from gateway.api.openai.responses import ErrorAnswer
from gateway.context import RequestContext
from gateway.generation.job import Job, RequestOptions
from gateway.http.route import Routes, Stream, json_response
from gateway.service import Service

routes = Routes("llama.cpp", ErrorAnswer, scope="inference")


@routes.post(
    "/infill",
    about="Write the text between a prefix and a suffix, as llama.cpp does.",
    takes=(InfillBody,),
    gives=(InfillAnswer, dict[str, Any]),
    streams=Stream((InfillChunk, InfillAnswer)),
)
def infill(service: Service, context: RequestContext) -> Response:
    body, unknown = service.bodies.parse_known(request, InfillBody)
    with translate_errors(request_path):
        asked = body.completion()
        check_completion(asked)
        use = service.use(context, asked.model, asked)
        with context.timeline.tokenizing():
            completion = Completion(asked, use.model, max_prompts=1, files=body.files)
        context.ignored = ignored_fields([*unknown, *completion.ignored], asked.strict_params)
        envelope = InfillEnvelope(
            asked.model or use.model.names[0],
            truncated=completion.num_left_out > 0,
            returns_tokens=bool(body.return_tokens),
            response_fields=body.response_fields or (),
            extensions=context.extensions(),
        )
        options = RequestOptions.from_body(asked, f"infill-{context.request_id}")
        job = Job(use, context, completion.prompt_requests, options)
        if body.stream:
            return service.runner.stream(job, partial(InfillStream, envelope=envelope))
        group, collected = service.runner.whole(job)
    return json_response(whole_infill(group, collected, envelope))
