"""The face that offers vLLM's gRPC API over any engine."""
