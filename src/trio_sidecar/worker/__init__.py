"""The face beside Dynamo; the only package that imports it."""
