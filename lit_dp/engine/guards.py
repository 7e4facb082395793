"""The guards of a training: what is looked at while it runs, unless it is told not to."""

from lightning.pytorch import Callback

from lit_dp.engine.monitored import MonitoredValues
from lit_dp.engine.nonfinite import Mode, NonFinite
from lit_dp.engine.replicas import Replicas


def guards(nonfinite: Mode = "stop") -> list[Callback]:
    """Callbacks to be put before all others: they look at what no other has touched yet.

    Args:
        nonfinite: what becomes of a step whose loss or gradients are not finite, see `NonFinite`.
    """
    return [MonitoredValues(), Replicas(), NonFinite(nonfinite)]
