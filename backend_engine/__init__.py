"""The co-located engine: any decoder-only transformers model behind an OpenAI-style HTTP frontend.

It schedules continuous batches over slots and pages, and says how long each request queued, prefilled and decoded.
"""
