"""What programs cost: FLOPs, bytes, seconds and memory a rank; and the report of it. Each formula stands here once."""

from fxpar.cost.build_report import ReportBasis, make_report
from fxpar.cost.figures import Report

__all__ = ["Report", "ReportBasis", "make_report"]
