"""Memory tasks: what of the past reaches the output, measured with controls."""

from subquad.bench.recall.measure import Plan, Result, measure, worth
from subquad.bench.recall.rows import ROWS, Row
from subquad.bench.recall.tasks import TASKS, Batch, Task, make_task

__all__ = ["ROWS", "TASKS", "Batch", "Plan", "Result", "Row", "Task", "make_task", "measure", "worth"]
