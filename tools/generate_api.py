"""Write docs/api.md, and put the tutorials' code into their pages.

``generate_api.py --write`` does; without the flag it only says whether the pages agree with the source. The source is
parsed and not imported.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
DOCS = ROOT / "docs"
API_PAGE = DOCS / "api.md"
PAGES_WITH_CODE = (
    DOCS / "extending.md",
    DOCS / "tutorials" / "own_engine.md",
    DOCS / "tutorials" / "own_face.md",
)
PUBLIC = {
    "trio_sidecar.engines.contract": "The engine contract.",
    "trio_sidecar.engines.remote": "Any server of the gRPC contract as an engine.",
    "trio_sidecar.engines.mock": "The deterministic engine.",
    "trio_sidecar.engines.vllm": "vLLM in this process; needs the extra `vllm`.",
    "trio_sidecar.engines.mock_tokenizer": "The tokenizer and the model directory of the mock engine.",
    "trio_sidecar.server": "The face for vLLM's gRPC API.",
    "trio_sidecar.worker": "The face beside Dynamo; needs the extra `dynamo`.",
    "trio_sidecar.bridge": "Trio and asyncio on one thread.",
    "trio_sidecar.config": "Settings.",
    "trio_sidecar.errors": "What can go wrong.",
    "trio_sidecar.wire.methods": "The calls of the contract.",
    "trio_sidecar.testing.fake_engine": "An engine that plays a script, for tests of faces.",
    "trio_sidecar.testing.peer": "An HTTP/2 peer that misbehaves as a test wants.",
    "trio_sidecar.testing.proxy": "A network between two ends, with faults.",
}
"""The modules that others may import, each with what it is for; their names are those of ``__all__``."""

INTRODUCTION = """\
Made from `__all__` and the docstrings by `tools/generate_api.py --write`. What is not listed here may change in any
release; what is, changes as [extending](extending.md) says. Everything is typed (`py.typed`). Names that begin with
`aio_` are awaited from asyncio, all others from Trio."""
MESSAGES = "The messages of the contract are in `trio_sidecar.wire`, with the names that they have in `protos/`."

Definition: TypeAlias = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def module_path(name: str) -> Path:
    """Where a module's source is."""
    path = SOURCE.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def public_names(tree: ast.Module) -> list[str]:
    """The names in ``__all__``, or every public class and function where there is none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return sorted(ast.literal_eval(node.value))
    return sorted(node.name for node in tree.body if isinstance(node, Definition) and not node.name.startswith("_"))


def describe(module: str, name: str) -> tuple[str, str]:
    """What a name is, with its parameters, and the first sentence about it; re-exports are followed."""
    body = ast.parse(module_path(module).read_text(encoding="utf-8")).body
    for at, node in enumerate(body):
        if isinstance(node, Definition) and node.name == name:
            signature = f"({ast.unparse(node.args)})" if not isinstance(node, ast.ClassDef) else ""
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            return f"{kind} `{name}`" if not signature else f"`{name}{short(signature)}`", first_sentence(node)
        if isinstance(node, ast.ImportFrom) and node.module and name in {alias.name for alias in node.names}:
            return describe(node.module, name)
        if name in {ast.unparse(target) for target in getattr(node, "targets", [getattr(node, "target", node)])}:
            after = body[at + 1] if at + 1 < len(body) else None
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                return f"`{name}`", str(after.value.value).strip().split("\n\n")[0]
            return f"`{name}`", ""
    reason = f"{module} has no {name}"
    raise LookupError(reason)


def short(signature: str) -> str:
    """A signature without what it says to type checkers alone."""
    return re.sub(r"\s+", " ", signature).replace("|", "\\|")


def first_sentence(node: Definition) -> str:
    """Of the docstring, without its roles."""
    text = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`").replace("|", "\\|")


def api_page() -> str:
    """The whole page."""
    parts = ["# Public API", INTRODUCTION, MESSAGES]
    for module, meaning in PUBLIC.items():
        names = public_names(ast.parse(module_path(module).read_text(encoding="utf-8")))
        rows = [" | ".join(("", *describe(module, name), "")).strip() for name in names]
        parts += [f"## `{module}`", meaning, "\n".join(["| name | meaning |", "|---|---|", *rows])]
    return "\n\n".join(parts) + "\n"


def with_code(text: str) -> str:
    """A page with every block after ``<!-- code: PATH -->`` made anew; PATH is from the root, ``PATH#NAME`` a class."""

    def fill(found: re.Match[str]) -> str:
        path, _, name = found[1].partition("#")
        source = (ROOT / path).read_text(encoding="utf-8")
        if name:
            (node,) = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name]
            source = f"{ast.get_source_segment(source, node)}\n"
        return f"<!-- code: {found[1]} -->\n\n```python\n{source}```\n\n<!-- /code -->"

    return re.sub(r"<!-- code: (\S+) -->.*?<!-- /code -->", fill, text, flags=re.DOTALL)


def wanted() -> dict[Path, str]:
    """What each page should be."""
    return {API_PAGE: api_page()} | {path: with_code(path.read_text(encoding="utf-8")) for path in PAGES_WITH_CODE}


def main() -> int:
    """Compare or write; 1 if a page does not agree."""
    wrong = [
        (path, text) for path, text in wanted().items() if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path, text in wrong:
        if "--write" in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")
        print(f"{path.relative_to(ROOT)} does not agree with the source")  # noqa: T201
    if not wrong:
        print("the public API and the tutorials agree")  # noqa: T201
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
