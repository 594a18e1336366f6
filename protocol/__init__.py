"""Protocol: what crosses the wire between apps, gateway, engine and observer, and nothing else.

Server-sent events, error shapes, header names, identifiers and the in-band timings object; no room's logic lives here.
"""
