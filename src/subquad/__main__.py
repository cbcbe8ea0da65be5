"""`python -m subquad`, the same as `subquad`."""

from subquad.cli import run

run()
