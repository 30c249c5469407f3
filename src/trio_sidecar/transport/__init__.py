"""The gRPC client: connections, pool, retry policy."""
