"""The report of a benchmark's runs: an HTML page, the same tables as Markdown, and a CSV file."""

from polymask.report.benchmark.files import write_report
from polymask.report.benchmark.page import benchmark_page

__all__ = ["benchmark_page", "write_report"]
