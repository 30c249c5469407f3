"""Engines: whatever answers the contract."""
