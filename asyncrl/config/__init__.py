"""Typed, frozen configuration: one pydantic model per section. Importing it never imports torch."""

from asyncrl.config.root import Config

__all__ = ["Config"]
