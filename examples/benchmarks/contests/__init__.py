"""Contests: programs measured in turn, claims about their numbers, pages of results.

A contest file makes its contest of these classes in `get_contest()`; `contest.py`
beside this package runs it.
"""

from contests.contest import Case, Contest, Contestant, Row

__all__ = ["Case", "Contest", "Contestant", "Row"]
