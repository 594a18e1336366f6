"""The `tokenline` command, thin: each verb calls one function elsewhere."""
