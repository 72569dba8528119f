"""The routes of the web page and of the guide: `/`, `/reference`, `/docs` and the files that they
load.

They need no key, because the files are the same on all servers. The page asks for a key if the API
requires one.
"""

from __future__ import annotations

from collections.abc import Mapping

from flask import Response, request

from gateway.api.openai.responses import ErrorAnswer
from gateway.auth.gate import NoSuchRoute
from gateway.context import RequestContext
from gateway.http.route import Parameter, Routes
from gateway.service import Service
from gateway.web.files import CONTENT_TYPES, HEADERS, PAGE, StaticFile, static_files
from gateway.web.guide_files import guide_file, guide_headers, has_guide

routes = Routes("Web page", ErrorAnswer, scope="public")
TEXT_TYPES = tuple(kind.partition(";")[0] for kind in CONTENT_TYPES.values())


@routes.get("/", about="The web page: chats and comparisons.", text_types=("text/html",))
@routes.get(
    "/reference", about="The web page's reference of all routes.", text_types=("text/html",)
)
def page(service: Service, context: RequestContext) -> Response:
    return _page_file(service, PAGE)


@routes.get("/docs", about="Leads to the guide, `/docs/`.", text_types=("text/html",))
def guide(service: Service, context: RequestContext) -> Response:
    _check_has_page(service)
    # Relative: a proxy may serve this under another path.
    return Response(status=308, headers={"Location": "docs/"})


@routes.get(
    "/docs/",
    about="The guide: all pages of the documentation, with a search.",
    text_types=("text/html",),
)
@routes.get(
    "/docs/<path:name>",
    is_probe=True,  # a visit to a page loads many files
    about="A file of the guide.",
    text_types=TEXT_TYPES,
    parameters=(Parameter("name", "Path of the file in the guide.", place="path"),),
)
def guide_page(service: Service, context: RequestContext, name: str = "") -> Response:
    return _guide_file(service, name)


@routes.get(
    "/web/<path:name>",
    is_probe=True,  # a visit to the page loads many files
    about="A file of the web page.",
    text_types=TEXT_TYPES,
    parameters=(Parameter("name", "Path of the file.", place="path"),),
)
def web_file(service: Service, context: RequestContext, name: str) -> Response:
    return _page_file(service, name)


def _check_has_page(service: Service) -> None:
    """Raise NoSuchRoute if this server sends no files."""
    if not service.config.web:
        raise NoSuchRoute("this server has no web page, because it was started with --no-web")


def _page_file(service: Service, name: str) -> Response:
    """Return a file of the web page. Raises NoSuchRoute."""
    _check_has_page(service)
    found = static_files().get(name)
    if found is None:
        raise NoSuchRoute(f"the web page has no file {name!r}")
    return _answer(found, HEADERS)


def _guide_file(service: Service, name: str) -> Response:
    """Return a file of the guide. Raises NoSuchRoute."""
    _check_has_page(service)
    if not has_guide():
        raise NoSuchRoute(
            "this installation has no guide. To build it: make docs. The same pages are in the "
            "folder docs of the source"
        )
    found = guide_file(name)
    if found is None:
        raise NoSuchRoute(f"the guide has no page {name!r}; its first page is /docs/")
    return _answer(found, guide_headers())


def _answer(found: StaticFile, headers: Mapping[str, str]) -> Response:
    """Return a file, or the status 304 if the client has it already."""
    gzipped = found.gzipped if request.accept_encodings.quality("gzip") > 0 else None
    response = Response(found.data if gzipped is None else gzipped, content_type=found.content_type)
    response.headers.update(headers)
    if gzipped is not None:
        response.headers["Content-Encoding"] = "gzip"
    response.set_etag(found.digest if gzipped is None else f"{found.digest}-gzip")
    response.make_conditional(request)
    return response
