"""Timing conformance of any OpenAI-compatible gateway, from outside: what it does to bytes, and whether its numbers
are true.

A scripted upstream behind the gateway and a client before it share one clock. What the gateway did lies between what
the upstream wrote and what the client read, so every published figure has bounds that hold on any machine.
"""
