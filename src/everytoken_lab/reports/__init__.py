"""The page of one or several runs: groups of seeds, intervals, curves, classes, predictions and token maps."""

from everytoken_lab.reports.collect import Report, ReportOptions, report

__all__ = ["Report", "ReportOptions", "report"]
