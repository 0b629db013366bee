"""What a split program costs: passes, collectives, memory a rank, and what is not split and why."""

from fxpar.report.build_report import make_report
from fxpar.report.figures import Report

__all__ = ["Report", "make_report"]
