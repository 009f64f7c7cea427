"""Makes the pages of `asv publish` work offline: puts what they load from other hosts beside them.

Run as a program: `python tests/benchmarks/pages.py FOLDER`.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

VENDOR = Path(__file__).parent / "vendor"
PAGES = ("index.html", "error.html")

_ELSEWHERE = re.compile(r'(?P<kind>src|href)="https?://[^"]*/(?P<file>[^"/]+\.(?:js|css))"(?P<rest>[^>]*)>')
_GUARDS = re.compile(r'\s+(?:integrity|crossorigin|referrerpolicy)="[^"]*"')
_NAMES = re.compile(r"^jquery-[\d.]+\.min\.js$")


class NotVendored(FileNotFoundError):
    """The pages load something that we have no copy of: asv has changed."""


def _copy_of(name: str) -> Path:
    plain = _NAMES.sub("jquery.min.js", name)
    for candidate in (plain, plain.replace(".min.js", ".js")):
        if (VENDOR / candidate).is_file():
            return VENDOR / candidate
    raise NotVendored(f"asv's pages load {name}, of which {VENDOR} holds no copy")


def localise(page: str, into: Path) -> str:
    """`page` with what it loads from elsewhere replaced by copies in the folder `into`. Raises `NotVendored`."""

    def local(match: re.Match[str]) -> str:
        copy = _copy_of(match["file"])
        into.mkdir(exist_ok=True)
        shutil.copy(copy, into / copy.name)
        return f'{match["kind"]}="{into.name}/{copy.name}"{_GUARDS.sub("", match["rest"])}>'

    return _ELSEWHERE.sub(local, page)


def make_local(folder: Path) -> None:
    """Localise all pages of a published folder. Idempotent."""
    for name in PAGES:
        page = folder / name
        if page.is_file():
            page.write_text(localise(page.read_text(encoding="utf-8"), folder / "vendor"), encoding="utf-8")


if __name__ == "__main__":
    make_local(Path(sys.argv[1]))
