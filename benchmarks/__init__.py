"""Our own measurements against peers and limits. Each prints what it measured, and JSON with --json."""
