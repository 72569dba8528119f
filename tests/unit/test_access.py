"""Access control: keys, scopes, hosts, origins and spellings of paths, without sockets."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from werkzeug.datastructures import Headers

from gateway.api.openai.responses import ErrorAnswer
from gateway.auth.caller import Caller
from gateway.auth.gate import (
    Forbidden,
    Gate,
    MalformedTarget,
    NoSuchRoute,
    RequestHead,
    Scopes,
    Unauthenticated,
)
from gateway.auth.keys import Keyring, KeyWatch
from gateway.auth.request_head import HostRule, host_name, matches_rule, path_error, printable
from gateway.context import request_id_from
from gateway.http.route import Routes
from protocol.config.gateway import GatewayConfig
from protocol.shared.api_keys import KeyEntry, digest_of
from protocol.wire.errors import InvalidRequest, RequestError
from protocol.wire.loopback import is_loopback

ROWS = [
    SimpleNamespace(rule="/open", method="get", scope="public"),
    SimpleNamespace(rule="/chat", method="post", scope="inference"),
    SimpleNamespace(rule="/metrics", method="get", scope="metrics"),
    SimpleNamespace(rule="/drain", method="post", scope="admin"),
    SimpleNamespace(rule="/models/<path:name>", method="get", scope="inference"),
]
RULES = [SimpleNamespace(rule=row.rule, methods={row.method.upper(), "OPTIONS"}) for row in ROWS]
KEYS = {
    "user": KeyEntry(digest=digest_of("user")),
    "watch": KeyEntry(digest=digest_of("watch"), scopes=["metrics"]),
    "boss": KeyEntry(digest=digest_of("boss"), scopes=["admin", "inference"]),
}


def gate(keys: dict[str, KeyEntry] | None = KEYS, **config: Any) -> Gate:
    ring = None if keys is None else Keyring(keys)
    return Gate(GatewayConfig(**config), Scopes(RULES, ROWS), lambda: ring)


def visit(
    rule: str | None, method: str = "GET", *, target: str | None = None, **changes: Any
) -> RequestHead:
    """Return the head of a request. `changes` are headers, with _ for -, or `peer` or `protocol`.
    The default Host header is one that the gate admits."""
    own = {"peer": "127.0.0.1", "protocol": "HTTP/1.1"}
    fields = {name: changes.pop(name, value) for name, value in own.items()}
    headers = Headers({"Host": "localhost:8000"})
    for name, value in changes.items():
        headers[name.replace("_", "-")] = value
    return RequestHead(
        method=method, target=target or rule or "/nowhere", rule=rule, headers=headers, **fields
    )


# ---- keys and scopes
@pytest.mark.parametrize("header", [{"Authorization": "Bearer user"}, {"X_Api_Key": "user"}])
def test_a_key_allows_only_the_routes_of_its_scopes(header: dict[str, str]):
    assert gate().admit(visit("/chat", "POST", **header)).name == "user"
    for rule, method in (("/metrics", "GET"), ("/drain", "POST")):
        with pytest.raises(Forbidden, match="scope"):
            gate().admit(visit(rule, method, **header))


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_other_methods_of_a_route_need_no_less(method: str):
    with pytest.raises(Unauthenticated):
        gate().admit(visit("/metrics", method))
    if method != "OPTIONS":
        with pytest.raises(Forbidden):
            gate().admit(visit("/metrics", method, X_Api_Key="user"))


@pytest.mark.parametrize("rule", ["/chat", None])
@pytest.mark.parametrize(
    "key", ["", "Bearer", "Bearer ", "Bearer  users", "Basic user", "user", "Bearer us er", "\xff"]
)
def test_a_missing_or_wrong_key_gets_the_same_error_for_every_route(rule: str | None, key: str):
    with pytest.raises(Unauthenticated):
        gate().admit(visit(rule, "POST", Authorization=key))


def test_a_public_route_needs_no_key_and_gives_no_rights():
    assert gate().admit(visit("/open")).scopes == frozenset()
    assert gate().admit(visit("/open", Authorization="Bearer wrong")).scopes == frozenset()


def test_metrics_need_no_key_if_the_operator_says_so():
    with pytest.raises(Unauthenticated):
        gate().admit(visit("/metrics"))
    opened = gate(public_metrics=True)
    assert opened.admit(visit("/metrics")).scopes == frozenset()
    assert opened.admit(visit("/metrics", Authorization="Bearer wrong")).scopes == frozenset()
    with pytest.raises(Unauthenticated):
        opened.admit(visit("/chat", method="POST"))


def test_an_unknown_route_is_reported_to_a_client_with_a_key():
    assert gate().admit(visit(None, X_Api_Key="user")).name == "user"


def test_a_route_that_declares_no_scope_keeps_the_server_from_starting():
    with pytest.raises(ValueError, match="no scope is declared for GET /new, POST /new"):
        Scopes([*RULES, SimpleNamespace(rule="/new", methods={"GET", "POST", "HEAD"})], ROWS)


def test_a_route_cannot_be_declared_without_a_scope():
    with pytest.raises(TypeError, match="scope"):
        Routes("New", ErrorAnswer).get("/new", about="A new route.")


def test_without_keys_only_this_machine_administers():
    local, remote = (
        gate(None, host="0.0.0.0", insecure_no_auth=True).admit(visit("/chat", "POST", peer=peer))
        for peer in ("127.0.0.1", "10.0.0.7")
    )
    assert "admin" in local.scopes
    assert remote.scopes == {"inference", "metrics"}
    with pytest.raises(Forbidden, match="own machine"):
        gate(None).admit(visit("/drain", "POST", peer="10.0.0.7"))


def test_each_key_is_a_separate_owner_and_namespace():
    ring = Keyring({**KEYS, "other": KeyEntry(digest=digest_of("other"), namespace="user")})
    user, boss, other = (ring.find(key) for key in ("user", "boss", "other"))
    assert user
    assert boss
    assert other
    assert len({caller.owner for caller in (user, boss, other)}) == 3
    assert len({caller.namespace("") for caller in (user, boss, other)}) == 3, "a group is no key"
    assert user.namespace("a") != user.namespace("b")
    assert user.namespace("boss") != boss.namespace("user")


def test_a_key_ends_its_own_requests_and_an_admins_those_of_all():
    ring = Keyring(KEYS)
    user, boss, watch = (ring.find(key) for key in ("user", "boss", "watch"))
    assert user
    assert boss
    assert watch
    labels = user.labels("cmpl-1")
    assert user.abort_label("cmpl-1") in labels
    assert boss.abort_label("cmpl-1") in labels
    assert watch.abort_label("cmpl-1") not in labels


def test_no_request_id_is_the_label_by_which_another_key_finds_its_request():
    user = Keyring(KEYS).find("user")
    assert user
    assert request_id_from("cmpl-1") == "cmpl-1", "clients may choose the id"
    assert request_id_from(user.abort_label("cmpl-1")) != user.abort_label("cmpl-1")


def test_a_field_that_a_key_may_not_use_is_refused_by_name():
    caller = Caller.from_key("a", KeyEntry(digest="0" * 64, max_n=4, priority=-2))
    caller.check_limits(4, -2)
    for n, priority, field in ((5, 0, "n"), (1, -3, "priority")):
        with pytest.raises(InvalidRequest) as refused:
            caller.check_limits(n, priority)
        assert refused.value.param == field


# ---- the file, as it changes
@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    rewrite(path, "alice")
    return path


def rewrite(path: Path, *names: str) -> None:
    """Replace the keys file by another one, as an editor does."""
    draft = path.with_suffix(".new")
    draft.write_text("".join(f'[keys.{n}]\ndigest = "{digest_of(n)}"\n' for n in names))
    os.replace(draft, path)


def opens(watch: KeyWatch) -> set[str]:
    return {name for name in ("alice", "bob", "carol") if watch.keyring.find(name)}


def test_a_changed_file_is_read_again(keys_file: Path):
    watch = KeyWatch(GatewayConfig(api_keys=str(keys_file)))
    assert opens(watch) == {"alice"}
    rewrite(keys_file, "bob", "carol")
    watch.poll()
    assert opens(watch) == {"bob", "carol"}
    rewrite(keys_file)
    watch.poll()
    assert opens(watch) == set(), "no keys is not: no keys needed"


def test_a_broken_file_keeps_the_old_keys_and_is_logged_once(
    keys_file: Path, caplog: pytest.LogCaptureFixture
):
    watch = KeyWatch(GatewayConfig(api_keys=str(keys_file)))
    for breaks in (lambda: keys_file.write_text("[keys.a"), keys_file.unlink):
        caplog.clear()
        breaks()
        for _ in range(3):
            watch.poll()
        (line,) = [r for r in caplog.records if r.levelno == logging.ERROR]
        assert "the previous keys stay valid" in line.getMessage()
        assert opens(watch) == {"alice"}
    rewrite(keys_file, "bob")
    watch.poll()
    assert opens(watch) == {"bob"}


def test_a_file_that_is_wrong_at_the_start_is_an_error(tmp_path: Path):
    with pytest.raises(ValueError, match="No such file"):
        KeyWatch(GatewayConfig(api_keys=str(tmp_path / "none.toml")))


def test_a_key_by_option_opens_everything_beside_those_of_the_file(keys_file: Path):
    for name, value in (("api_key", "bob"), ("api_key_digests", digest_of("bob"))):
        watch = KeyWatch(GatewayConfig(api_keys=str(keys_file), **{name: [value]}))  # type: ignore[arg-type]
        assert opens(watch) == {"alice", "bob"}
        bob = watch.keyring.find("bob")
        assert bob.scopes == {"inference", "admin", "metrics"}


# ---- hosts and origins
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "127.1.2.3"])
def test_loopback(host: str):
    assert is_loopback(host)
    GatewayConfig(host=host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "", "10.0.0.1", "example.org", "127.0.0.1.nip.io"]
)
def test_other_hosts_need_keys(host: str):
    assert not is_loopback(host)
    with pytest.raises(ValueError, match="insecure_no_auth"):
        GatewayConfig(host=host)
    for field, value in (("insecure_no_auth", True), ("api_keys", "f"), ("api_key", ["k"])):
        GatewayConfig(host=host, **{field: value})  # type: ignore[arg-type]


GOOD_HOSTS = [
    "localhost",
    "LOCALHOST:8000",
    "127.0.0.1:8000",
    "[::1]:8000",
    "app.localhost",
    "10.0.0.1",
]


@pytest.mark.parametrize("host", GOOD_HOSTS)
def test_names_of_loopback_and_addresses_are_always_good(host: str):
    assert gate().admit(visit("/open", Host=host)).name == ""


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "notlocalhost"]
)
def test_a_name_that_was_rebound_to_loopback_is_refused(host: str):
    with pytest.raises(Forbidden, match="allowed-host"):
        gate().admit(visit("/open", Host=host))
    assert gate(allowed_host=[host.upper()]).admit(visit("/open", Host=f"{host}:80"))
    assert gate(host="0.0.0.0", api_keys="f").admit(visit("/open", Host=host))


@pytest.mark.parametrize(
    "host", ["", "localhost, evil", "localhost/x", "a@b", "localhost:99999", "[::1", "a b", "."]
)
def test_a_host_that_is_none_is_malformed(host: str):
    with pytest.raises(MalformedTarget):
        gate().admit(visit("/open", Host=host))


def test_only_http_1_0_may_leave_the_host_out():
    assert gate().admit(visit("/open", Host="", protocol="HTTP/1.0"))


def test_a_server_elsewhere_answers_to_the_names_that_were_given_if_any_were():
    assert HostRule.from_options("0.0.0.0", []).admits("any.example")
    named = HostRule.from_options("0.0.0.0", ["llm.example"])
    assert named.admits("llm.example")
    assert not named.admits("any.example")
    assert host_name("LLM.example.:443") == "llm.example"


EVIL = "https://evil.example"


def test_without_keys_pages_of_other_origins_may_not_even_send():
    for origin in (EVIL, "null", "http://localhost:3000"):
        with pytest.raises(Forbidden, match="cors-origin"):
            gate(None).admit(visit("/chat", "POST", Origin=origin))
    assert gate(None).admit(visit("/chat", "POST", Origin="http://localhost:8000"))
    assert gate(None, cors_origin=[EVIL]).admit(visit("/chat", "POST", Origin=EVIL))
    assert gate().admit(visit("/chat", "POST", Origin=EVIL, X_Api_Key="user")), "it has a key"


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_without_keys_a_page_of_another_origin_may_not_send_without_its_origin(site: str):
    for method in ("POST", "DELETE"):
        with pytest.raises(Forbidden, match="cors-origin"):
            gate(None).admit(visit("/chat", method, Sec_Fetch_Site=site))
    assert gate(None).admit(visit("/open", Sec_Fetch_Site=site)), "a link of another site"
    assert gate(None, cors_origin=["*"]).admit(visit("/chat", "POST", Sec_Fetch_Site=site))
    assert gate(None).admit(visit("/chat", "POST", Sec_Fetch_Site="same-origin"))


def test_no_page_reads_an_answer_unless_its_origin_was_allowed():
    asking = visit("/chat", "POST", Origin=EVIL)
    assert gate().cors_headers(asking) == {}
    allowing = gate(cors_origin=["https://app.example"])
    assert allowing.cors_headers(asking) == {"Vary": "Origin"}
    ours = visit("/chat", "POST", Origin="https://app.example")
    assert allowing.cors_headers(ours)["Access-Control-Allow-Origin"] == "https://app.example"
    assert "Access-Control-Allow-Credentials" not in allowing.cors_headers(ours)
    assert gate(cors_origin=["*"]).cors_headers(asking)["Access-Control-Allow-Origin"] == EVIL


def test_a_preflight_needs_no_key_but_an_allowed_origin():
    def ask(origin: str) -> RequestHead:
        return visit("/chat", "OPTIONS", Origin=origin, Access_Control_Request_Method="POST")

    allowing = gate(cors_origin=["https://app.example"])
    assert allowing.is_allowed_preflight(ask("https://app.example"))
    assert not allowing.is_allowed_preflight(ask(EVIL))
    assert not gate().is_allowed_preflight(ask(EVIL))
    assert not allowing.is_allowed_preflight(
        visit("/chat", "OPTIONS", Origin="https://app.example")
    )


# ---- spellings
@pytest.mark.parametrize(
    "path",
    [
        "//v1/models",
        "/v1//models",
        "/v1/./models",
        "/v1/../models",
        "/v1/%2e%2e/x",
        "/v1/.%2E/x",
        "/a%00b",
        "/a%0d%0ab",
        "/a\\b",
        "/a%5cb",
        "/é",
        "http://localhost/x",
        "*",
        "",
        "x",
    ],
)
def test_paths_that_servers_disagree_about_are_malformed(path: str):
    assert path_error(path) is not None


def test_other_paths_are_not():
    for path in ("/", "/v1/models/org%2Fname", "/v1/models/a..b", "/v1/models/%C3%A9"):
        assert path_error(path) is None


@pytest.mark.parametrize(
    ("path", "rule", "fits"),
    [
        ("/v1/models", "/v1/models", True),
        ("/v1/%6dodels", "/v1/models", False),
        ("/v1%2fmodels", "/v1/models", False),
        ("/v1/models/org/name", "/v1/models/<path:name>", True),
        ("/v1/models/org%2Fname", "/v1/models/<path:name>", True),
        ("/v1/responses/a%20b/cancel", "/v1/responses/<response_id>/cancel", True),
        ("/v1/responses/a/b/cancel", "/v1/responses/<response_id>/cancel", False),
        ("/v1/responses/a%2Fcancel", "/v1/responses/<response_id>/cancel", False),
    ],
)
def test_fixed_parts_of_a_rule_match_only_the_same_characters(path: str, rule: str, fits: bool):
    assert matches_rule(path, rule) is fits


def test_another_spelling_of_a_route_is_no_route():
    with pytest.raises(NoSuchRoute):
        gate().admit(visit("/chat", "POST", target="/%63hat", X_Api_Key="user"))
    with pytest.raises(Unauthenticated):
        gate().admit(visit("/chat", "POST", target="/%63hat"))
    with pytest.raises(NoSuchRoute):
        gate().admit(visit("/open", target="/%6fpen", X_Api_Key="user"))


def test_a_path_in_a_log_is_one_line_of_bounded_length():
    assert printable("/a\nb\x1b[31m c\xff") == "/a%0Ab%1B[31m%20c%FF"
    assert len(printable("/" + "\n" * 10_000)) < 700


def test_every_refusal_is_the_callers_to_hear():
    for kind in (MalformedTarget, NoSuchRoute, Unauthenticated, Forbidden):
        assert issubclass(kind, RequestError)
