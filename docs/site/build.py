"""Builds the pages of docs/ as a site, which a gateway serves at `/docs`.

    python docs/site/build.py [--out gateway/web/guide]

Sphinx reads a copy of the pages, because they are written to be read in the repository: links to
files that are not part of the site, such as sources, become plain text in the copy. The sections
of docs/README.md are the sections of the site. Any warning is an error, for example a link to a
heading that does not exist.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import posixpath
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SITE = Path(__file__).resolve().parent
OUT = ROOT / "gateway" / "web" / "guide"
POLICY = "policy.json"
"""File of the site with the digests of the scripts and styles inside its pages. The gateway allows
only these (gateway/web/guide_files.py)."""
TOP_PAGES = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages outside docs/ -> their names in the site."""
INDEX = "README.md"
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
ENTRY = re.compile(r"^\| \[([^\]]+)\]\(([^)]+)\) \|", re.MULTILINE)
LEFT_OUT = ("genindex.html", "objects.inv", ".buildinfo", ".doctrees", "_sources")
"""Files that Sphinx makes for other programs and for itself."""

STYLES = {"opacity: 50%": 'opacity="50%"', "display: none;": 'display="none"'}
"""Values of `style` in Furo's pages -> attributes of SVG."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT, help="folder for the site")
    args = parser.parse_args()
    try:
        pages = build(args.out)
    except ImportError as error:
        print(f"the site needs Sphinx, MyST and Furo ({error})", file=sys.stderr)
        return 1
    size = sum(path.stat().st_size for path in args.out.rglob("*") if path.is_file())
    print(f"{args.out}: {pages} pages, {size / 1e6:.1f} MB")
    return 0


def build(out: Path) -> int:
    """Build the site in `out`, which is replaced when the site is whole. Return its number of
    pages. Raises ImportError if a library is missing, and RuntimeError after a warning."""
    import furo  # noqa: F401
    import myst_parser  # noqa: F401
    from sphinx.cmd.build import build_main

    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "source", Path(folder) / "made"
        prepare(source)
        options = ["--fail-on-warning", "--keep-going", "--quiet", "--conf-dir", str(SITE)]
        if build_main(["-b", "html", *options, str(source), str(made)]) != 0:
            raise RuntimeError("the site has faults: see the warnings above")
        for name in LEFT_OUT:
            shutil.rmtree(made / name, ignore_errors=True)
            (made / name).unlink(missing_ok=True)
        pages = sorted(made.rglob("*.html"))
        for page in pages:
            page.write_text(without_style_attributes(page.read_text()))
        (made / POLICY).write_text(json.dumps(policy(page.read_text() for page in pages)))
        out.parent.mkdir(parents=True, exist_ok=True)
        new = out.with_name(f"{out.name}.part")
        shutil.rmtree(new, ignore_errors=True)
        shutil.copytree(made, new)
        shutil.rmtree(out, ignore_errors=True)
        os.replace(new, out)
    return len(pages)


def prepare(source: Path) -> None:
    """Write what Sphinx reads into `source`: the pages with links for the site, and the images."""
    for path in DOCS.rglob("*"):
        place = path.relative_to(DOCS)
        if path.is_dir() or SITE in path.parents:
            continue
        target = source / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            text = for_site(path.read_text(encoding="utf-8"), f"docs/{place.as_posix()}")
            text += contents(text) if place.as_posix() == INDEX else ""
            target.write_text(text, encoding="utf-8")
        else:
            shutil.copyfile(path, target)
    for name, place in TOP_PAGES.items():
        text = for_site((ROOT / name).read_text(encoding="utf-8"), name)
        (source / place).write_text(text, encoding="utf-8")
    (source / INDEX).rename(source / "index.md")


def for_site(text: str, page: str) -> str:
    """Return a page's text with links for the site. Links that are shown as the name of a file show
    its title instead.

    page    path of the page in the repository, such as "docs/use/page.md"
    """
    here = posixpath.dirname(place_in_site(page) or "")
    folder = posixpath.dirname(page)

    def relink(match: re.Match[str]) -> str:
        mark, label, link = match.groups()
        target, hash_sign, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:") or not target:
            return match[0]
        place = place_in_site(posixpath.normpath(posixpath.join(folder, target)))
        if place is None:
            return label
        if label.endswith(".md"):
            label = title_of(ROOT / posixpath.normpath(posixpath.join(folder, target)))
        return f"{mark}[{label}]({posixpath.relpath(place, here or '.')}{hash_sign}{anchor})"

    pieces, at = [], 0
    for code in CODE.finditer(text):
        pieces += [LINK.sub(relink, text[at : code.start()]), code[0]]
        at = code.end()
    return "".join((*pieces, LINK.sub(relink, text[at:])))


@cache
def title_of(page: Path) -> str:
    """Return the title of a page: its first heading."""
    found = re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else page.name


def place_in_site(path: str) -> str | None:
    """Return where a file of the repository is in the site; None if it is not part of it."""
    if path == f"docs/{INDEX}":
        return "index.md"
    if path.startswith("docs/") and not path.startswith("docs/site/"):
        return path.removeprefix("docs/") if (ROOT / path).is_file() else None
    return TOP_PAGES.get(path)


def contents(index: str) -> str:
    """Return the table of contents in MyST's form: the sections of the index and their pages."""
    lines = []
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        lines += ["", "```{toctree}", ":hidden:", f":caption: {title}", ""]
        lines += [place for _, place in ENTRY.findall(body)]
        lines += ["```"]
    others = [place for place in TOP_PAGES.values() if place not in "\n".join(lines)]
    lines += ["", "```{toctree}", ":hidden:", ":caption: About", "", *others, "```", ""]
    return "\n".join(lines)


def without_style_attributes(text: str) -> str:
    """Return a page with the attributes of SVG that mean what its `style` attributes say. Styles in
    attributes are not allowed by the gateway. Raises ValueError if another is there."""
    for style, attribute in STYLES.items():
        text = text.replace(f'style="{style}"', attribute)
    if found := re.search(r'<[^>]*\sstyle="[^>]*>', text):
        raise ValueError(f"add this to STYLES: {found[0]}")
    return text


def policy(pages: Iterator[str]) -> dict[str, list[str]]:
    """Return the digests of all scripts and styles inside pages, as a Content-Security-Policy has
    them."""
    found: dict[str, set[str]] = {"script": set(), "style": set()}
    for text in pages:
        for script in re.findall(r"<script(?![^>]*\ssrc=)[^>]*>(.*?)</script>", text, re.S):
            found["script"].add(_digest(script))
        for style in re.findall(r"<style[^>]*>(.*?)</style>", text, re.S):
            found["style"].add(_digest(style))
    return {kind: sorted(digests) for kind, digests in found.items()}


def _digest(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


if __name__ == "__main__":
    sys.exit(main())
