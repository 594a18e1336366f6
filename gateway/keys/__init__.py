"""Tenant keys: how they are made, stored as hashes, and verified without asking the store on every request."""
