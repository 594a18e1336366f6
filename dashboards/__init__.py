"""What people look at: the console's pages, and dashboards and alerts for Prometheus and Grafana.

Everything here shows numbers that another room measured; nothing here measures or sums.
"""
