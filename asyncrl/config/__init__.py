"""Typed, frozen configuration: one pydantic model per section. Importing it never imports torch.

`root` and `sections` declare the settings. `reading` makes a configuration from files and options. `checks` and
`placement` refuse settings that cannot work. `arguments` lists what may be passed on to engines and routers.
"""

from asyncrl.config.root import Config

__all__ = ["Config"]
