"""The one error of a configuration that can't be used."""


class SettingsError(Exception):
    """Says which key, what its value is, where it came from and what is allowed."""
