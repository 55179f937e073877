"""Code that `package.module:function` names, as far as it can be read without importing it.

Invariants
- No module of the user is executed. Only the packages around a module are looked for, and its source is parsed.
- Nothing is refused that might exist: a module that makes its names as it is imported passes, and so does one that is
  not a file of Python source.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from asyncrl.config.nearest import did_you_mean, nearest


@dataclass(frozen=True, slots=True)
class Named:
    """What a dotted path names."""

    problem: str | None = None
    """Why it cannot be imported; None if it may."""
    signature: inspect.Signature | None = None
    """Of a plain function; a default is any object. None where it does not show."""


def read_named(path: str) -> Named:
    """Looks for `package.module:function`, whose form is right."""
    module, _, function = path.partition(":")
    spec: ModuleSpec | None = None
    places: Sequence[str] | None = None
    seen: list[str] = []
    for part in module.split("."):
        spec = _find(part, places, ".".join(seen))
        if spec is None:
            return Named(_missing_module(part, places, ".".join(seen)))
        seen.append(part)
        places = _places(spec, part, places)
        if places is None and len(seen) <= module.count("."):
            return Named(f"{'.'.join(seen)!r} is a module, not a package, so there is no module {module!r}")
    assert spec is not None
    source = _source(spec)
    names = None if source is None else _names(source)
    if source is None or names is None:
        return Named()
    first = function.partition(".")[0]
    if first not in names:
        hint = did_you_mean(f"{module}:{name}" for name in nearest(first, names))
        return Named(f"{module!r} has no {first!r}{hint}")
    return Named(signature=_signature(source, function))


def _find(part: str, places: Sequence[str] | None, package: str) -> ModuleSpec | None:
    if package:
        return PathFinder.find_spec(part, places)  # with the package's name it would ask for the imported package
    # As `resolve_dotted_path` looks, the current directory included.
    if (loaded := sys.modules.get(part)) is not None and loaded.__spec__ is not None:
        return loaded.__spec__
    return PathFinder.find_spec(part, [str(Path.cwd())]) or importlib.util.find_spec(part)


def _places(spec: ModuleSpec, part: str, around: Sequence[str] | None) -> Sequence[str] | None:
    """Where the modules of a package lie; None for a module."""
    if spec.origin is None and around is not None:
        return [str(Path(place) / part) for place in around]
    return spec.submodule_search_locations


def _missing_module(part: str, places: Sequence[str] | None, package: str) -> str:
    where = [Path(place) for place in (places if places is not None else [str(Path.cwd())])]
    beside = {path.stem for place in where for path in place.glob("*.py")}
    beside |= {path.parent.name for place in where for path in place.glob("*/__init__.py")}
    if package:
        return f"package {package!r} has no module {part!r}{did_you_mean(nearest(part, beside))}"
    looked = f"looked in {Path.cwd()} and on the Python path"
    return f"there is no module {part!r} ({looked}){did_you_mean(nearest(part, beside))}"


def _source(spec: ModuleSpec) -> ast.Module | None:
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        return ast.parse(Path(spec.origin).read_bytes())
    except (OSError, SyntaxError, ValueError):  # the import will say what is wrong with it
        return None


def _names(source: ast.Module) -> set[str] | None:
    """Names that the module has at its top; None where they do not show."""
    names: set[str] = set()
    for node in _statements(source.body):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.ImportFrom(names=[ast.alias(name="*")]):
                return None
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name.partition(".")[0] for alias in aliases}
            case _:
                names |= {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
                if any(isinstance(inner, ast.Call) and _changes_names(inner) for inner in ast.walk(node)):
                    return None
    return None if "__getattr__" in names else names


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, inside its conditions too; definitions are not entered."""
    for node in body:
        inner = [getattr(node, name, None) for name in ("body", "orelse", "finalbody")]
        blocks = [block for block in inner if isinstance(block, list)]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or not blocks:
            yield node
            continue
        for block in blocks:
            yield from _statements(block)
        for handler in getattr(node, "handlers", ()):
            yield from _statements(handler.body)


def _changes_names(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id in {"globals", "setattr", "exec", "vars"}


def _signature(source: ast.Module, function: str) -> inspect.Signature | None:
    """Of a function that is defined once, and neither decorated nor inside something else."""
    made = [n for n in source.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name == function]
    if len(made) != 1 or made[0].decorator_list:
        return None
    given = made[0].args
    positional = [*given.posonlyargs, *given.args]
    defaults = [inspect.Parameter.empty] * (len(positional) - len(given.defaults)) + [None] * len(given.defaults)
    parameters = [
        inspect.Parameter(
            argument.arg,
            inspect.Parameter.POSITIONAL_ONLY
            if place < len(given.posonlyargs)
            else inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=default,
        )
        for place, (argument, default) in enumerate(zip(positional, defaults, strict=True))
    ]
    if given.vararg is not None:
        parameters.append(inspect.Parameter(given.vararg.arg, inspect.Parameter.VAR_POSITIONAL))
    for argument, value in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        default = inspect.Parameter.empty if value is None else None
        parameters.append(inspect.Parameter(argument.arg, inspect.Parameter.KEYWORD_ONLY, default=default))
    if given.kwarg is not None:
        parameters.append(inspect.Parameter(given.kwarg.arg, inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters)
