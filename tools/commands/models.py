"""`tidegate models`, and the argument MODEL of other commands.

MODEL is one of these, in this order of precedence; ./NAME always means a path:

- a name from the catalogue
- a .gguf file, or a Hugging Face directory
- a model on the Hugging Face Hub, or a URL (`tools.models.names`)
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from protocol.process.exit_codes import ExitCode
from protocol.shared.gguf_parts import has_magic
from protocol.tools.start_facts import MemoryFacts, Preflight
from tools.doctor_findings import describe_states
from tools.failure import Failure
from tools.models.catalogue import CATALOGUE, DEFAULT, HUB_MODELS, HubEntry, description
from tools.models.fetch import PrintLine, fetch, format_size, home, print_on_stderr
from tools.models.preflight import memory_facts, preflight_each
from tools.models.pulling import nearest_names, parse_name, pulled_path
from tools.models.records import PulledModel
from tools.models.stored import hub_cache, stored_models
from tools.paths import user_path

DESCRIPTION = (
    "List the models in the cache, with the memory that each needs on this machine, and the models "
    "of the catalogue."
)

EXAMPLES = """\
examples:
  tidegate models
  tidegate models --json | jq -r '.[].path'       only the models in the cache
  tidegate models --json | jq -r '.[] | select(.error == "") | .name'    only those that fit here
"""


def add_model(
    parser: argparse.ArgumentParser, *, default: str | None = None, several: bool = False
) -> None:
    """Add the argument MODEL. `default` is its value if the user does not give it. With `several`
    it may be given more than once, and its value is a list."""
    more = "; several models, or NAME=MODEL, to choose by name in each request" * several
    parser.add_argument(
        "model",
        nargs="*" if several else "?",
        default=default,
        metavar="MODEL",
        help="a name from `tidegate models`, a Hugging Face directory, a .gguf file, or OWNER/REPO "
        f"or OWNER/REPO:QUANTISATION on the Hugging Face Hub (default {DEFAULT}){more}",
    )


def resolve(
    model: str, cache: Path, print_line: PrintLine = print_on_stderr, *, text_only: bool = False
) -> Path:
    """Return the absolute path of MODEL. Download the model first if necessary. Raises Failure if
    there is no such model, or if it cannot be downloaded.

    cache        Tidegate's directory of downloads
    print_line   prints a line of progress
    text_only    accept a directory that contains only a tokenizer
    """
    if entry := CATALOGUE.get(model):
        return fetch(entry, cache, print_line)
    path = user_path(model).absolute()
    if path.is_dir() and model not in HUB_MODELS:
        needed = "tokenizer.json" if text_only else "config.json"
        if not (path / needed).is_file():
            raise _bad_model(f"{path} is not a Hugging Face model directory: it has no {needed}")
        return path
    if path.is_file() and model not in HUB_MODELS:
        if path.suffix != ".gguf" and not _is_gguf(path):
            raise _bad_model(f"{path} is neither a GGUF file nor a Hugging Face directory")
        return path
    name = None if is_path(model) else parse_name(model)
    if name is None:
        raise _bad_model(f"no model {model!r}: {suggestion(model)}")
    return pulled_path(name, cache, print_line)


def _is_gguf(path: Path) -> bool:
    """Return whether a file whose name does not end with .gguf, such as one of Ollama's, is a GGUF
    file. Raises Failure if it cannot be read."""
    try:
        return has_magic(path)
    except OSError as error:
        raise _bad_model(f"{path} cannot be read: {error.strerror}") from None


def is_path(model: str) -> bool:
    """Return whether MODEL can only be a path."""
    return model.startswith(("/", ".", "~"))


def suggestion(model: str) -> str:
    """Return advice for a user whose MODEL is neither an existing path nor a name."""
    if is_path(model):
        return "no such file or directory"
    return nearest_names(model) or (
        "it is neither a path, nor OWNER/REPO on the Hugging Face Hub, nor a name in the catalogue "
        "(tidegate models)"
    )


def _bad_model(message: str) -> Failure:
    return Failure(message, exit_code=ExitCode.BAD_MODEL)


SPEEDS = """
speeds are upper estimates: how often a second this machine can read the weights of a token; with
long prompts, or on busy cores, a model is slower
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the models in the cache as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the models in the cache and the models of the catalogue; with --json only the former,
    as JSON."""
    stored = stored_models(home())
    found = preflight_each([model.path for model in stored]) if stored else []
    if options.json:
        fields = [_fields(model, each) for model, each in zip(stored, found, strict=True)]
        print(msgspec.json.format(msgspec.json.encode(fields)).decode())
        return 0
    for model, each in zip(stored, found, strict=True):
        print(f"{model.name}\n  {format_size(model.size)}, {model.kind}; {model.path}")
        print(f"  {memory_line(each)}")
    if not stored:
        print("no models in the cache yet")
    print(f"\ncache: {home()}  (set $TIDEGATE_HOME to change it)")
    if hub := hub_cache():
        print(f"cache of the Hugging Face Hub: {hub}  (set $HF_HOME to change it)")
    print("\nmodels to pull or serve by name; other names: tidegate pull --help")
    for entry in CATALOGUE.values():
        print(f"{entry.name}\n  {entry.description}")
        print(f"  {entry.licence}; {format_size(entry.file_bytes)}")
    facts = memory_facts(home() / "measurements")
    if facts is not None and facts.read_bytes_per_s:
        print(SPEEDS)
    for hub_entry in HUB_MODELS.values():
        print("\n  ".join([hub_entry.name, *hub_lines(hub_entry, facts)]))
    return 0


def hub_lines(entry: HubEntry, facts: MemoryFacts | None) -> list[str]:
    """Return what is known about a model on the Hub before its download.

    facts   the memory of this machine; None: not known
    """
    terms = "; terms to accept on its page" if entry.is_gated else ""
    best = "; recommended" if entry.is_recommended else ""
    needs = (
        f"needs about {format_size(entry.needed_bytes)} of memory "
        f"({format_size(entry.weight_bytes)} of weights, "
        f"{format_size(entry.rest_bytes)} for K/V and work)"
    )
    if facts is not None and entry.needed_bytes > facts.free_bytes:
        needs += f"; too large: {format_size(facts.free_bytes)} are free"
    elif facts is not None and facts.read_bytes_per_s and entry.task == "chat":
        needs += f"; at most {entry.max_tokens_per_s(facts.read_bytes_per_s):,.2g} tokens/s here"
    return [
        description(entry),
        f"{entry.licence}{terms}; {format_size(entry.weight_bytes)} in {entry.form}{best}",
        needs,
    ]


def memory_line(found: Preflight) -> str:
    """Return a phrase that says how much memory a model takes on this machine, or why this machine
    cannot serve it."""
    if found.error:
        return f"cannot be served here: {found.error}; {found.remedy}"
    (plan,) = found.plans
    parts = (
        f"{format_size(plan.weights_bytes)} of weights, "
        f"{format_size(plan.kv_bytes) + ' of' if plan.has_kv else 'no'} K/V, "
        f"{format_size(plan.work_bytes)} of working memory"
    )
    if plan.state_bytes:
        states = describe_states(plan, format_size(plan.request_state_bytes))
        parts += f", {format_size(plan.state_bytes)} of it for recurrent states: {states}"
    if plan.image_bytes:
        parts += f", {format_size(plan.image_bytes)} for images"
    limit = f"requests of up to {plan.max_len:,} tokens"
    return f"takes {format_size(plan.device_bytes)} of memory by default ({parts}); {limit}"


def _fields(model: PulledModel, found: Preflight) -> dict[str, object]:
    plan = next(iter(found.plans), None)
    return {
        "name": model.name,
        "kind": model.kind,
        "size_bytes": model.size,
        "path": model.path,
        "licence": model.licence,
        "commit": model.commit,
        "weights_bytes": plan.weights_bytes if plan else None,
        "kv_bytes": plan.kv_bytes if plan else None,
        "work_bytes": plan.work_bytes if plan else None,
        "image_bytes": plan.image_bytes if plan else None,
        "max_slots": plan.max_slots if plan else None,
        "state_bytes": plan.state_bytes if plan else None,
        "request_state_bytes": plan.request_state_bytes if plan else None,
        "num_checkpoints": plan.num_checkpoints if plan else None,
        "max_len": plan.max_len if plan else None,
        "error": found.error,
    }
