"""How large the code is and how it hangs together: lines of code, folders, parameter lists, circles, docstrings.

    python benchmarks/code_size.py [--root CHECKOUT] [--before CHECKOUT] [--save]

Prints a table over the package `asyncrl` of the checkout at `--root` (default: this one), with the checkout at
`--before` beside it. With `--save` the figures go to benchmarks/results/code_size.json.

Definitions
- A line of code holds a token of the program: no docstring (of an attribute neither), no comment, no blank line.
- A parameter is everything that a function declares, `*args` as well; the `self` or `cls` of a method is not counted.
- A circle is a set of modules each of which imports all others of the set, directly or over others of it. An import
  inside a function counts as one at the top. A type-only circle needs an import under `if TYPE_CHECKING`.
- Public is a function, method or class whose name, and whose class's name, begins with no underscore. Functions inside
  functions, overloads and setters are not public.

`tests/test_structure.py` holds the limits; it measures with these functions.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "asyncrl"
RESULTS = ROOT / "benchmarks" / "results" / "code_size.json"

Function = ast.FunctionDef | ast.AsyncFunctionDef
_LAYOUT = {
    *(tokenize.ENCODING, tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}
"""Kinds of tokens that make no line a line of code."""


@dataclass(frozen=True, slots=True)
class Module:
    """One file of the package."""

    name: str
    """As it is imported: `asyncrl.data.batch`; a package's `__init__.py` has the package's name."""
    path: Path
    source: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        """Lines of the file, as an editor counts them."""
        return len(self.source.splitlines())


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one checkout."""

    files: int
    lines: int
    """Everything in the files."""
    code_lines: int
    longest_file: tuple[str, int]
    """Path from the root, and its lines."""
    largest_folder: tuple[str, int]
    """Path from the root, and the Python files directly in it."""
    largest_parameter_list: tuple[str, int]
    """Dotted name, and its parameters."""
    circles: int
    type_only_circles: int
    casts: int
    public_names: int
    """Public functions, methods and classes."""
    without_docstring: int
    """Public names that have none."""


def read_modules(root: Path, package: str = PACKAGE) -> dict[str, Module]:
    """Modules of `package` in the checkout at `root`, by dotted name; links to the loops are none of them.

    Raises FileNotFoundError, SyntaxError.
    """
    folder = root / package
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; --root and --before name a checkout that holds {package}/")
    modules = {}
    for path in sorted(path for path in folder.rglob("*.py") if not path.is_symlink()):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        source = path.read_text()
        modules[name] = Module(name, path, source, ast.parse(source))
    return modules


def code_lines(source: str) -> int:
    """Lines of `source` without docstrings, comments and blanks."""
    tree = ast.parse(source)
    texts = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    starts = {(text.lineno, text.col_offset) for text in texts}
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT and token.start not in starts:
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found)


def folder_sizes(modules: Mapping[str, Module]) -> dict[Path, int]:
    """Folder → Python files directly in it."""
    return dict(Counter(module.path.parent for module in modules.values()))


def parameter_counts(modules: Mapping[str, Module]) -> dict[str, int]:
    """Dotted name of each function, nested ones included → its parameters without `self` and `cls`."""
    counts: dict[str, int] = {}
    for module in modules.values():
        for name, function, in_class in _functions(module.tree, module.name):
            declared = function.args
            named = [*declared.posonlyargs, *declared.args]
            bound = in_class and bool(named) and named[0].arg in ("self", "cls")
            rest = (declared.vararg is not None) + (declared.kwarg is not None)
            count = len(named) - bound + len(declared.kwonlyargs) + rest
            counts[name] = max(count, counts.get(name, 0))  # a property has one name for two functions
    return counts


def public_names(modules: Mapping[str, Module]) -> dict[str, bool]:
    """Dotted name of each public function, method and class → whether it has a docstring."""
    found: dict[str, bool] = {}
    for module in modules.values():
        for name, node in _public(module.tree.body, module.name):
            found[name] = ast.get_docstring(node) is not None
    return found


def casts(modules: Mapping[str, Module]) -> int:
    """Calls of `cast`."""
    nodes = (node for module in modules.values() for node in ast.walk(module.tree))
    return sum(isinstance(node, ast.Call) and ast.unparse(node.func) in ("cast", "typing.cast") for node in nodes)


def imports(modules: Mapping[str, Module], *, type_only: bool) -> dict[str, set[str]]:
    """Module → modules of the package that it imports by name; `type_only`: those under `if TYPE_CHECKING` as well."""
    return {name: set(_imported(module, modules, type_only)) - {name} for name, module in modules.items()}


def circles(graph: Mapping[str, set[str]]) -> list[tuple[str, ...]]:
    """The largest sets of modules that reach each other, each sorted by name; none where imports point one way."""
    reached = {name: _reach(graph, name) for name in graph}
    found = {tuple(sorted(other for other in reached[name] if name in reached[other])) for name in graph}
    return sorted(circle for circle in found if len(circle) > 1)


def type_only_circles(modules: Mapping[str, Module]) -> list[tuple[str, ...]]:
    """Circles that there would not be without imports under `if TYPE_CHECKING`."""
    at_run_time = circles(imports(modules, type_only=False))
    return [circle for circle in circles(imports(modules, type_only=True)) if circle not in at_run_time]


def measure(root: Path, package: str = PACKAGE) -> Summary:
    """All figures of the checkout at `root`."""
    modules = read_modules(root, package)
    longest = max(modules.values(), key=lambda module: module.lines)
    folders, parameters, public = folder_sizes(modules), parameter_counts(modules), public_names(modules)
    folder, name = max(folders, key=folders.__getitem__), max(parameters, key=parameters.__getitem__)
    return Summary(
        files=len(modules),
        lines=sum(module.lines for module in modules.values()),
        code_lines=sum(code_lines(module.source) for module in modules.values()),
        longest_file=(str(longest.path.relative_to(root)), longest.lines),
        largest_folder=(str(folder.relative_to(root)), folders[folder]),
        largest_parameter_list=(name, parameters[name]),
        circles=len(circles(imports(modules, type_only=False))),
        type_only_circles=len(type_only_circles(modules)),
        casts=casts(modules),
        public_names=len(public),
        without_docstring=sum(not documented for documented in public.values()),
    )


def table(columns: Mapping[str, Summary]) -> str:
    """The figures as a Markdown table, a column for each checkout."""
    rows = [["", *columns], ["---", *("---:" for _ in columns)]]
    for field in Summary.__dataclass_fields__:
        values = (getattr(summary, field) for summary in columns.values())
        cells = (f"{value[1]} ({value[0]})" if isinstance(value, tuple) else f"{value:,}" for value in values)
        rows.append([field.replace("_", " "), *cells])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _functions(node: ast.AST, name: str) -> Iterator[tuple[str, Function, bool]]:
    """Every function under `node`: dotted name, its definition, and whether a class holds it."""
    for child in ast.iter_child_nodes(node):
        inner = name
        if isinstance(child, Function | ast.ClassDef):
            inner = f"{name}.{child.name}"
            if isinstance(child, Function):
                yield inner, child, isinstance(node, ast.ClassDef)
        yield from _functions(child, inner)


def _public(body: list[ast.stmt], name: str) -> Iterator[tuple[str, Function | ast.ClassDef]]:
    for node in body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            marks = {ast.unparse(mark).rpartition(".")[2] for mark in node.decorator_list}
            if not marks & {"overload", "setter"}:
                yield f"{name}.{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from _public(node.body, f"{name}.{node.name}")


def _imported(module: Module, modules: Mapping[str, Module], type_only: bool) -> Iterator[str]:
    checked_only = {
        id(inner)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(module.tree):
        if id(node) in checked_only and not type_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            source = _source(node, module)
            for alias in node.names:
                whole = f"{source}.{alias.name}"
                if whole in modules:
                    yield whole
                elif source in modules:
                    yield source


def _source(node: ast.ImportFrom, module: Module) -> str:
    """The module that `from ... import` names, also where it names it relatively."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    package = parts if module.path.name == "__init__.py" else parts[:-1]
    return ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])


def _reach(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """`start` and every module that it imports, directly or over others."""
    found, to_do = {start}, [start]
    while to_do:
        new = graph[to_do.pop()] - found
        found |= new
        to_do += new
    return found


def main() -> None:
    """Prints the table, and saves it when asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, metavar="CHECKOUT", help="the checkout to measure")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="an earlier one, for a column beside it")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    args = parser.parse_args()
    columns = {} if args.before is None else {"before": measure(args.before)}
    columns["after" if columns else "now"] = measure(args.root)
    print(table(columns))
    if args.save:
        RESULTS.write_text(json.dumps({name: asdict(summary) for name, summary in columns.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
