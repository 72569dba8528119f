"""The routes of the web page: `/`, `/docs` and the files that they load.

They need no key, because the files are the same on all servers. The page asks for a key if the API
requires one.
"""

from __future__ import annotations

from flask import Response, request

from gateway.api.openai.responses import ErrorAnswer
from gateway.auth.gate import NoSuchRoute
from gateway.context import RequestContext
from gateway.http.route import Parameter, Routes
from gateway.service import Service
from gateway.web.files import CONTENT_TYPES, HEADERS, PAGE, static_files

routes = Routes("Web page", ErrorAnswer, scope="public")


@routes.get("/", about="The web page: chats and comparisons.", text_types=("text/html",))
@routes.get("/docs", about="The web page's reference of all routes.", text_types=("text/html",))
def page(service: Service, context: RequestContext) -> Response:
    return _file(service, PAGE)


@routes.get(
    "/web/<path:name>",
    is_probe=True,  # a visit to the page loads many files
    about="A file of the web page.",
    text_types=tuple(kind.partition(";")[0] for kind in CONTENT_TYPES.values()),
    parameters=(Parameter("name", "Path of the file.", place="path"),),
)
def web_file(service: Service, context: RequestContext, name: str) -> Response:
    return _file(service, name)


def _file(service: Service, name: str) -> Response:
    """Return a file, or the status 304 if the client has it already. Raises NoSuchRoute."""
    if not service.config.web:
        raise NoSuchRoute("this server has no web page, because it was started with --no-web")
    found = static_files().get(name)
    if found is None:
        raise NoSuchRoute(f"the web page has no file {name!r}")
    gzipped = found.gzipped if request.accept_encodings.quality("gzip") > 0 else None
    response = Response(found.data if gzipped is None else gzipped, content_type=found.content_type)
    response.headers.update(HEADERS)
    if gzipped is not None:
        response.headers["Content-Encoding"] = "gzip"
    response.set_etag(found.digest if gzipped is None else f"{found.digest}-gzip")
    response.make_conditional(request)
    return response
