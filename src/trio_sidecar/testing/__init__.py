"""Fakes and fault injection, shipped for users' tests."""
