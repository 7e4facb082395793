"""How gradients meet: all-reduce, step by step, with every byte accounted for (law L11)."""

from lit_dp.collectives.algorithms import Algorithm, all_reduce
from lit_dp.collectives.wire import Traffic, count_traffic

__all__ = ["Algorithm", "Traffic", "all_reduce", "count_traffic"]
