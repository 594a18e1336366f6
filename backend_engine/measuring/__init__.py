"""Measurements of the engine's own parts, each in a process of its own; `tokenline bench` starts them."""
