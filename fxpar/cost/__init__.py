"""What a split program costs: passes, collectives, memory a rank, and what is not split and why."""

from fxpar.cost.build_report import make_report
from fxpar.cost.figures import Report

__all__ = ["Report", "make_report"]
