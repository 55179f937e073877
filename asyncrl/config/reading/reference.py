"""The table of all settings as Markdown: `python -m asyncrl.config.reading.reference > docs/configuration.md`."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.reading.help import default_in_words
from asyncrl.config.reading.schema import fields

_INTRODUCTION = """\
# Configuration

Every setting of a run, generated from the schema in `asyncrl/config/` (`python -m asyncrl.config.reading.reference`).

A run is described by TOML files and options; later files win over earlier ones, and options over files:

    python entrypoints/train.py @ recipe.toml @ mine.toml --train.lr 1e-3

- In a file a setting stands in its section (`[train]`, `lr = 1e-3`); as an option it is `--train.lr 1e-3`. Dashes and
  underscores are the same in both.
- `none` unsets what may be unset, in files (`num_steps = "none"`) and options (`--train.num-steps none`).
- Lists take several values (`--rollout.stop A B`) or a literal (`--engine.gpus '[1, 2]'`); a setting that is true or
  false may stand alone (`--rollout.ignore-eos`).
- Tables take single entries (`--engine.server-args.chunked-prefill-size 2048`), which are merged with those of the
  files, or a literal (`--data.args '{max_terms = 3}'`), which replaces them.
- A value that starts with `@` or `--` is written with an equals sign: `--rollout.stop=--`.
- Relative paths are relative to the current directory, not to the file that names them.
- `--dry-run` prints the resolved configuration with the origin of each value, the process layout, and the memory that
  each process needs. It starts nothing, and refuses what does not fit. With `--as 8x80GB` (or `8xH100`, or `2x8x80GB`
  for nodes) it plans for a machine that is not here: of the model it needs config.json and tokenizer alone.
  `--nproc-per-node` then says how many trainer ranks a node has, as torchrun's option does. `--help` prints this table.

All problems of a configuration are listed together, and nothing starts before there are none.
"""


def reference() -> str:
    """The text of docs/configuration.md."""
    return "\n".join([_INTRODUCTION, *_sections()]) + "\n"


def _sections() -> Iterator[str]:
    for spec in fields().values():
        if spec.kind == "section":
            yield f"\n## {spec.key}\n\n{spec.help}\n\n| setting | value | default | what it is |\n|---|---|---|---|"
            for field in fields().values():
                if field.path[:-1] == spec.path and field.kind not in ("section", "sections"):
                    cells = (f"`{field.key}`", field.expects, f"`{default_in_words(field.default)}`", field.help)
                    yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    print(reference(), end="")
