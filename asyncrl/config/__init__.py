"""Typed, frozen configuration: one pydantic model per section. Importing it never imports torch.

`root` holds the schema, `loading` reads files and options, `validation` and `layout` refuse what cannot work.
"""

from asyncrl.config.root import Config

__all__ = ["Config"]
