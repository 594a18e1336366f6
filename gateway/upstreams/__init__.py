"""The upstreams that answer requests: connections to them, and which of them a model goes to."""
