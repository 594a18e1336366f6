"""The gateway: the single entrance. Relay workers authenticate, choose an upstream, stream the answer, stamp marks.

They do only what must happen before or between bytes; everything that thinks runs in the observer.
"""
