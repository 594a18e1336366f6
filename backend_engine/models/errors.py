"""The one error of this room."""

from __future__ import annotations


class ModelError(ValueError):
    """A model that cannot be served; the message names it, what is wrong, and what to do."""


OTHER_ENGINE = "serve it with another engine, such as vLLM, and put that behind the gateway as an [[upstreams]] entry"
