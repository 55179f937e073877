"""Whatever a configuration holds, its TOML reads back as the same configuration."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, get_args

from annotated_types import Ge, Gt, Le, Lt
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from asyncrl.config.reading.layers import Layers
from asyncrl.config.reading.loading import build_config
from asyncrl.config.reading.redaction import is_secret
from asyncrl.config.reading.schema import ANY_NAME, FieldSpec, KeyPath, fields
from asyncrl.config.reading.toml import config_toml
from asyncrl.config.root import Config

CHARACTERS = st.characters(codec="utf-8", exclude_characters="\0")
TEXT = st.text(CHARACTERS, max_size=12).filter(lambda text: text != "none" and "://" not in text)
KEYS = TEXT.filter(lambda key: "-" not in key and not is_secret(key))
NUMBERS = st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.booleans()
VALUES = st.recursive(
    NUMBERS | TEXT, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6
)
MEMBERS: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXT,
    bool: st.booleans(),
    Path: TEXT.filter(lambda text: not text.startswith("~")).map(Path),
    Any: VALUES,
}


def values(spec: FieldSpec, bounds: list[Any]) -> st.SearchStrategy[Any]:
    """Any valid value of a field."""
    low = max((b.ge if isinstance(b, Ge) else b.gt for b in bounds if isinstance(b, Ge | Gt)), default=None)
    high = min((b.le if isinstance(b, Le) else b.lt for b in bounds if isinstance(b, Le | Lt)), default=None)
    edges = {
        "exclude_min": any(isinstance(b, Gt) for b in bounds),
        "exclude_max": any(isinstance(b, Lt) for b in bounds),
    }
    numbers: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(low, high),
        float: st.floats(low, high, allow_nan=False, allow_infinity=False, **edges),
    }
    members = [(MEMBERS | numbers).get(member, st.just(member)) for member in spec.accepts]
    drawn = st.one_of(members)
    if spec.kind == "list":
        drawn = st.lists(drawn, max_size=3).map(tuple)
    elif spec.kind == "table":
        drawn = st.dictionaries(KEYS, drawn, max_size=4)
    return st.none() | drawn if spec.nullable else drawn


def sections(model: type[BaseModel], path: KeyPath = ()) -> st.SearchStrategy[Any]:
    """Any valid instance of a section, each field at its default or drawn from its type and bounds."""
    drawn = {}
    for name, info in model.model_fields.items():
        spec = fields()[(*path, name)]
        if spec.kind == "section":
            inner = next(
                kind for kind in (info.annotation, *get_args(info.annotation)) if hasattr(kind, "model_fields")
            )
            drawn[name] = sections(inner, spec.path)
            if spec.nullable:
                drawn[name] |= st.none()
        elif spec.kind == "sections":
            names = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
            inside = sections(get_args(info.annotation)[1], (*spec.path, ANY_NAME))
            drawn[name] = st.dictionaries(names, inside, max_size=2)
        else:
            drawn[name] = values(spec, info.metadata)
    return st.fixed_dictionaries({}, optional=drawn).map(lambda chosen: model(**chosen))


@settings(max_examples=100)
@given(sections(Config))
def test_toml_reads_back_as_the_same_configuration(config: Config) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.toml"
        path.write_text(config_toml(config, dict.fromkeys((spec.key for spec in fields().values()), "a\nb\0")))
        layers = Layers()
        layers.add_file(str(path))
    read = build_config(layers)
    assert not layers.problems
    assert read == config
