"""Engines of other makes that run in our own engine's place, with the same settings."""
