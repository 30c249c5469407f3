"""The only package that knows asyncio and Trio at once."""
