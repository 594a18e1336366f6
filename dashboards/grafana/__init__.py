"""Grafana: dashboards as code, the JSON that is made of them, and what is checked on both."""
