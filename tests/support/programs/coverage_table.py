"""What `make coverage` prints: the lines and branches of each package that some test has run."""

from __future__ import annotations

import json
from collections import Counter, defaultdict

import coverage

from support.source_tree import ROOT

REPORT = ROOT / "build" / "coverage" / "report.json"


def main() -> None:
    data = coverage.Coverage()
    data.load()
    data.json_report(outfile=str(REPORT))
    packages: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for path, measured in json.loads(REPORT.read_text())["files"].items():
        for name in ("all", path.partition("/")[0]):
            packages[name].update(measured["summary"])
    print(f"{'package':12}{'lines':>16}{'branches':>22}")
    for name, sums in sorted(packages.items(), key=lambda item: (item[0] == "all", item[0])):
        lines = f"{100 * sums['covered_lines'] / sums['num_statements']:.1f}% of {sums['num_statements']}"
        branches = f"{100 * sums['covered_branches'] / max(1, sums['num_branches']):.1f}% of {sums['num_branches']}"
        print(f"{name:12}{lines:>16}{branches:>22}")


if __name__ == "__main__":
    main()
