"""Settings: one frozen object, loaded once, that every process of Tokenline is configured from.

`schema` says what can be set and what it means; `loader` reads a TOML file, both articles' spellings and the
environment into it.
"""

from settings.schema import Settings

__all__ = ["Settings"]
