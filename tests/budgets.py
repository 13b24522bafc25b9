"""Measures the budgets of CONTRIBUTING.md that need no run: `make budgets`. Exits with 1 if one is exceeded."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("broker", "client", "controller", "deploy", "protocol", "spark_jobs")

HABITS = (
    r"(?:^|[.:;!?]\s+)(?:What|Whatever|Who|Whoever|Whichever|Wherever)\b(?![^.?!]*\?)",
    r"^\s*(?:Of|As|So|By|That)\s+\w+",
    r"(?:,|;|\band|\bor|\bbut)\s+where\s+(?:it|they|he|she|there|the|a|an|one|no|all|nobody|somebody|that|this)\b",
    r"(?:^|[.;:,]\s+)[Ss]o (?:long|many|much|often|far)\b|\bfor so (?:long|many|much)\b"
    r"|\bso (?:long|many|often) (?:does|do|is|are)\b",
    r",\s+too\b",
    r"\b(?:is|are|was|were|be|been|not) told\b|\btells? (?:it|them|nothing|of|about)\b"
    r"|\btold (?:once|of|as|by|in|with)\b",
    r"\b(?:is|are|was|were) (?:not )?to (?:be|have|come|survive|hold|last|stay|go)\b",
    r"\bfor good\b|\bby its turn\b|\bin vain\b|\ball the same\b|\bmeanwhile\b.*\bmeanwhile\b",
    r"\bof which\b|\bthan which\b",
    r"\b(?:[Ss]omebody|[Nn]obody|[Aa]nybody|[Ee]verybody)\b",
    r"\b(?:of|with|to|from|for|by|after|before|behind|in) what"
    r" (?:is|was|has|had|it|they|there|a|an|the|came|comes|others?)\b",
)
"""Constructions of translated English, such as a sentence that opens with "What". A hit is a place to look at."""


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, check=True, capture_output=True, text=True)
    return [Path(line) for line in listed.stdout.splitlines() if not (ROOT / line).is_symlink()]


def module_of(path: Path) -> str:
    parts = path.with_suffix("").parts
    named = ("minibroker", *parts) if parts[0] in PACKAGES else parts
    return ".".join(named[:-1] if named[-1] == "__init__" else named)


def import_circles(paths: list[Path]) -> list[list[str]]:
    """Return the sets of files that import each other, also inside functions and under TYPE_CHECKING."""
    modules = {module_of(path): path for path in paths}
    imported = {module: set(_imports(ROOT / path, modules)) - {module} for module, path in modules.items()}
    reached = {module: _reachable(module, imported) for module in imported}
    circles = {
        tuple(sorted(other for other in reached[module] if module in reached[other]))
        for module in imported
        if module in reached[module]
    }
    return [list(circle) for circle in sorted(circles)]


def _imports(path: Path, modules: Collection[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in modules or node.module in modules:
                    yield whole if whole in modules else node.module


def _reachable(start: str, imported: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = list(imported[start])
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += imported[module]
    return found


def prose_of(path: Path) -> list[str]:
    """Return the paragraphs, docstrings, comments and messages of a file, each on one line."""
    text = (ROOT / path).read_text()
    if path.suffix == ".md":
        text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        return [" ".join(part.split()) for part in re.split(r"\n\s*\n|\n(?=[-*|#])", text) if part.strip()]
    pieces = [
        " ".join(node.value.split())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") >= 4
    ]
    comment: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comment.append(token.string.lstrip("# "))
        elif token.type not in (tokenize.NL, tokenize.NEWLINE) and comment:
            pieces.append(" ".join(comment))
            comment = []
    return list(dict.fromkeys(pieces))


def smells_per_1000_words(paths: list[Path]) -> float:
    pieces = [piece for path in paths for piece in prose_of(path)]
    hits = sum(len(re.findall(habit, piece)) for piece in pieces for habit in HABITS)
    return 1000 * hits / max(1, sum(len(piece.split()) for piece in pieces))


def main() -> int:
    python = tracked("*.py")
    product = [path for path in python if path.parts[0] in (*PACKAGES, "minibroker")]
    pages = [path for path in tracked("*.md") if path.name != "CHANGELOG.md"]
    for_users = [path for path in pages if path.parts[0] in ("README.md", "docs") and "internals" not in path.parts]
    commands = [path for path in product if "cli" in path.parts or path.name == "cli.py"]
    folder, files = Counter(path.parent for path in python if path.name != "__init__.py").most_common(1)[0]
    lines, longest = max((len((ROOT / path).read_text().splitlines()), path) for path in product)
    circles = import_circles(product)
    rows: list[tuple[str, float, float, str]] = [
        ("most Python files in a folder", files, 20, str(folder)),
        ("most lines in a product file", lines, 700, str(longest)),
        ("import circles", len(circles), 0, "; ".join(", ".join(circle) for circle in circles)),
        ("bytes of ARCHITECTURE.md", (ROOT / "ARCHITECTURE.md").stat().st_size, 40 * 1024, ""),
        ("prose smells per 1,000 words: README, docs, CLI", smells_per_1000_words(for_users + commands), 0.7, ""),
        ("prose smells per 1,000 words: everything", smells_per_1000_words(pages + python), 1.5, ""),
    ]
    for what, figure, limit, where in rows:
        verdict = "ok" if figure <= limit else "OVER"
        print(f"{verdict:4}  {what}: {round(figure, 2):,} (limit {limit:,}) {where}".rstrip())
    return int(any(figure > limit for _, figure, limit, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
