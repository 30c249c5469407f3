"""Pure conversions between Dynamo's dictionaries and the wire messages: no I/O, no async."""
