"""The drawings of docs/architecture.md: which parts of a package import which, from the graph of imports.

`make chart` draws them again.
"""

from pathlib import Path
from textwrap import wrap

import grimp

ARCHITECTURE = Path(__file__).parent / "architecture.md"
_DRAWINGS = (("autotune", "storage", "trials"), ("autotune.search", "autotune.prediction", "trials.model"))
_MARGIN, _WIDTH = 22, 90


def drawn() -> str:
    """Return docs/architecture.md with the drawings that the present imports give."""
    graph = grimp.build_graph("autotune", "storage", "trials")
    drawings = ["\n\n".join(_floors(graph, package) for package in packages) for packages in _DRAWINGS]
    before, *after = ARCHITECTURE.read_text().split("```floors\n")
    ends = (text.partition("```\n")[2] for text in after)
    return before + "".join(f"```floors\n{one}\n```\n{end}" for one, end in zip(drawings, ends, strict=True))


def _floors(graph: grimp.ImportGraph, package: str) -> str:
    """Return the parts of a package by floors: each imports only from floors below its own."""
    parts = graph.find_children(package)
    heights: dict[str, int] = {}

    def height(part: str) -> int:
        if part not in heights:
            imported = (
                other
                for other in parts - {part}
                if graph.direct_import_exists(importer=part, imported=other, as_packages=True)
            )
            heights[part] = 1 + max(map(height, imported), default=0)
        return heights[part]

    lines = []
    for floor in range(max(map(height, parts)), 0, -1):
        names = sorted(part.rpartition(".")[2] for part in parts if heights[part] == floor)
        lines += wrap(" ".join(names), _WIDTH)
    margins = [package.replace(".", "/") + "/", *[""] * len(lines)]
    return "\n".join(f"{margin:<{_MARGIN}}{line}" for margin, line in zip(margins, lines, strict=False))


if __name__ == "__main__":
    ARCHITECTURE.write_text(drawn())
