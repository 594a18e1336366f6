"""Load and truth from outside: whatever judges a gateway by its wire alone, as a client and as an upstream sees it.

Nothing here reads the gateway's inside; what it publishes is compared with what really went over the wire.
"""
