"""The bill of a conversion: what it costs and what it saves, with controls."""

from subquad.bench.bill.bill import Bill, Biller, plan_of
from subquad.bench.bill.masked import Vocabulary
from subquad.bench.bill.rows import ROWS

__all__ = ["ROWS", "Bill", "Biller", "Vocabulary", "plan_of"]
