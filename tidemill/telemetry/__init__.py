"""Traces and metrics of both services: contexts, spans, names and the exposition of metrics.

It does not know what is traced or measured.
"""
