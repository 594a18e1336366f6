"""Tracing: the timeline of a request. Marks become stages, stages become spans and metrics.

The ledger, its arithmetic and the names live here; `observer/` is the process that receives, joins, keeps and shows.
"""
