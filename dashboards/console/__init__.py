"""The console: server-rendered pages of single requests on the ops listener, behind the admin key."""

from dashboards.console.routes import console

__all__ = ["console"]
