"""A chart by matplotlib; its SVG takes its colours from the page around it, light or dark.

An artist gets a CSS class and a tooltip by `mark`. What is drawn has the names of `COLOURS`; in a page these are the
variables of its style sheet, alone the picture brings them along.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.ft.console.units import coarse_seconds, counted
from holdfast.harness.report.model import FaultRecord

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "ink": ("#1b1c22", "#e9e9ee"),
    "muted": ("#676a76", "#9c9eab"),
    "line": ("#e4e2dc", "#2d2f38"),
    "panel": ("#ffffff", "#191a20"),
    "fault": ("#d9480f", "#ff8a4c"),
    "reward": ("#3b5bdb", "#8aa2ff"),
    "held-out": ("#0b7a4b", "#51cf8a"),
    "roof": ("#a8a5a0", "#6f7280"),
    "s0": ("#3c5bdb", "#8ba2ff"),
    "s1": ("#da480f", "#ff8b4c"),
    "s2": ("#0c7a4b", "#52cf8a"),
    "s3": ("#9c36b5", "#c277dc"),
    "s4": ("#0c8599", "#2fb5c9"),
    "s5": ("#a07800", "#f2bd4b"),
    "s6": ("#c2255c", "#ff7aa2"),
}
"""The light and the dark colour of each name. All light ones differ: they are found by their value."""

OWN = r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->|<clipPath.*?</clipPath>"
"""What matplotlib writes and a page must not have, or does not need."""

FONT = 'svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--ink); }'

SERIES = 7
"""The colours s0 to s6 of lines and bars that stand for contestants."""


def light(name: str) -> str:
    """The colour that matplotlib draws with."""
    return COLOURS[name][0]


def variables() -> str:
    """The style sheet of all colours, light and dark."""
    bright, dark = ("".join(f"--{name}: {pair[way]}; " for name, pair in COLOURS.items()) for way in (0, 1))
    return f":root {{ {bright}}} @media (prefers-color-scheme: dark) {{ :root {{ {dark}}} }}"


class Chart:
    """A figure of so many points, of one or several axes below each other.

    Raises ModuleNotFoundError, naming what to install, without matplotlib.
    """

    def __init__(self, width: float, height: float, rows: Sequence[float] = (1.0,)) -> None:
        try:
            import matplotlib
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("charts need matplotlib: pip install 'holdfast[report]'") from error
        from matplotlib.figure import Figure

        self._settings: dict[str, Any] = {
            "svg.fonttype": "none",  # text as text: a tenth of the size
            "svg.hashsalt": "holdfast",
            "font.size": 12,
            "text.color": light("ink"),
            "axes.edgecolor": light("line"),
            "axes.labelcolor": light("muted"),
            "axes.titlesize": 14,
            "axes.titlelocation": "left",
            "axes.axisbelow": True,
            "xtick.color": light("muted"),
            "ytick.color": light("muted"),
            "grid.color": light("line"),
        }
        self._context: Any = getattr(matplotlib, "rc_context")  # noqa: B009  (its settings are typed by name)
        with self._context(self._settings):
            self.figure: Figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
            ratios = {"height_ratios": list(rows)}
            self.all_axes: list[Axes] = [
                row[0] for row in self.figure.subplots(len(rows), 1, squeeze=False, gridspec_kw=ratios)
            ]
        engine: Any = self.figure.get_layout_engine()
        engine.set(w_pad=0.12, h_pad=0.1)
        for axes in self.all_axes:
            axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
            axes.tick_params(length=0, which="both", pad=7)
        self._marks: list[tuple[str, str]] = []

    @property
    def axes(self) -> Axes:
        return self.all_axes[0]

    def mark(self, artist: Artist, words: str = "", cls: str = "") -> None:
        """Give a drawn thing a tooltip and a class."""
        artist.set_gid(f"mark-{len(self._marks)}-")
        self._marks.append((words, cls))

    def faults(
        self, faults: Sequence[FaultRecord], place: Callable[[FaultRecord], float], by_step: bool = False
    ) -> None:
        """Mark faults by numbered lines at the `place` of each."""
        for number, fault in enumerate(faults, start=1):
            x, across = place(fault), self.axes.get_xaxis_transform()
            self.axes.axvline(x, color=light("fault"), linewidth=1.25, linestyle=(0, (3, 3)))
            badge = self.axes.scatter(
                [x], [1.06], s=210, color=light("fault"), transform=across, clip_on=False, zorder=5
            )
            when = f"after {counted(fault.step, 'step')}" if by_step else f"at {coarse_seconds(fault.at)}"
            self.mark(badge, f"{fault.words} ({fault.target}), {when}")
            self.axes.text(
                x, 1.06, str(number), transform=across, ha="center", va="center_baseline", fontsize=11, weight="bold",
                color=light("panel"), zorder=6,
            )  # fmt: skip

    def svg(self, label: str, standalone: bool = False) -> str:
        """The picture in one line; `label` is its text alternative. `standalone`: with its colours and a ground."""
        out = io.StringIO()
        with self._context(self._settings):
            self.figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
        text = re.sub(OWN, "", out.getvalue(), flags=re.DOTALL)
        text = re.sub(r' clip-path="[^"]*"', "", text[text.index("<svg") :]).replace("xlink:href", "href")
        text = re.sub(r" font-family: [^;\"]*;?| transform=\"rotate\(-?0 [^\"]*\"", "", text)
        for name in COLOURS:
            text = text.replace(light(name), f"var(--{name})")
        for number, (words, cls) in enumerate(self._marks):
            opened = f'<g class="{cls}">' if cls else "<g>"
            tip = f"<title>{escape(words)}</title>" if words else ""
            text = text.replace(f'<g id="mark-{number}-">', opened + tip)
        text = re.sub(r' id="[a-z0-9]+(_\d+)+"', "", text)
        _, _, inner = text.partition(">")
        box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)
        assert box is not None
        ground = ""
        if standalone:
            size = f'width="{box[1]}" height="{box[2]}"'
            ground = f'<style>{variables()}{FONT}</style><rect {size} rx="14" style="fill: var(--panel)"/>'
        head = f'<svg {box[0]} role="img" aria-label="{escape(label)}" stroke-linejoin="round" xmlns="http://www.w3.org/2000/svg">'
        return " ".join((head + ground + inner).split("\n")).strip()

    def save(self, path: Path) -> None:
        """Write the picture, in the format that the name ends in, with light colours."""
        with self._context(self._settings):
            self.figure.savefig(path, dpi=150, facecolor=light("panel"))


def check_plot(path: Path) -> None:
    """Raise ValueError if a picture cannot be written to `path`; for use before anything is measured."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ValueError("plots need matplotlib: pip install 'holdfast[report]'") from error
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise ValueError(f"{path} does not say what to write: end it with .png or .svg ({', '.join(sorted(known))})")
