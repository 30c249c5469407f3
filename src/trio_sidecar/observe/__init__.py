"""Logging, metrics, traces."""
