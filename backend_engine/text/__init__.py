"""Text: tokenising and detokenising, chat templates, stop strings."""
