"""``trio-sidecar doctor``: what is broken between this machine and a served model, layer by layer, and what to do.

It only looks: nothing is registered, no request is generated on a remote engine, no setting is changed.
"""

from trio_sidecar.doctor.report import Finding, Mark, Report, Section
from trio_sidecar.doctor.run import Questions, examine

__all__ = ["Finding", "Mark", "Questions", "Report", "Section", "examine"]
