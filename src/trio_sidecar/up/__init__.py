"""An engine, a worker and a front end on one machine, supervised in one nursery; pure Trio.

The parts are processes of their own, as they would be in production; this package starts them in order, knows when each
is ready, ends them in order, and leaves none behind.
"""
