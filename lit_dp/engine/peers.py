"""The other ranks, as far as data and metrics need them: small messages, at moments that all ranks come by together."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lit_dp.errors import ConfigError


@dataclass(frozen=True)
class Peers:
    """This process among W. Every method is a collective: all ranks must call it."""

    rank: int
    world_size: int

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, by rank. It must be picklable."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def from_first(self, value: Any) -> Any:
        """Rank 0's value."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def require_equal(self, what: str, value: Any, advice: str, explain: Callable[[list[Any]], str] = str) -> None:
        """Raise ConfigError on every rank if the values differ between ranks.

        Args:
            what: names the value in the message.
            value: this rank's; compared with ==.
            advice: what to type instead.
            explain: makes text of all ranks' values; it may be told more than the values show.
        """
        values = self.gather(value)
        if different := [rank for rank, other in enumerate(values) if other != values[0]]:
            ranks = ", ".join(map(str, different))
            raise ConfigError(f"{what} of rank {ranks} differs from rank 0's: {explain(values)}; {advice}")
