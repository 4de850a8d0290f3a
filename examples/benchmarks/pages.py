"""Rewrites the summary and the pages of all results, from the root of the repository.

python examples/benchmarks/pages.py
"""

import pathlib

from contests.pages import SUMMARY, update_pages

if __name__ == "__main__":
    update_pages(SUMMARY, pathlib.Path(__file__).parent / "results")
