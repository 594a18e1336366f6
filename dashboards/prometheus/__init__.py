"""Prometheus: what it scrapes, which rules it records and when it wakes somebody."""
