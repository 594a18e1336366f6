"""Checking dashboards and rules: as data, and against a real Prometheus that scraped a real gateway."""
