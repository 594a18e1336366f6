"""The observer: one process that takes ledgers and spans, joins them, keeps what matters, and shows it.

It owns the metrics, the store, the OTLP receiver and export, and the ops listener.
"""
