"""A live view of running workers and engines, from their metrics."""
