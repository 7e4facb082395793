"""What became of an epoch's samples: the ledger's entry, and the line that is printed of it."""

from dataclasses import dataclass
from typing import NamedTuple

EXAMPLES = 5
UNKNOWN = "as its sampler drew it"


class Some(NamedTuple):
    """How many samples, and the indices of the first few of them."""

    count: int
    examples: tuple[int, ...]

    def said(self, what: str) -> list[str]:
        more = ", …" if self.count > len(self.examples) else ""
        return [f"{self.count:,} {what} ({', '.join(map(str, self.examples))}{more})"] if self.count else []


@dataclass(frozen=True)
class Account:
    """What became of one loader's samples in one epoch, over all ranks. Its `str` is the line that is printed,
    where epochs count from 1 as in all that a person reads.

    Attributes:
        epoch: from 0.
        loader: which of several training loaders; None for an only one.
        samples: in the dataset; None for a stream.
        used: different samples that were used, in `uses` uses.
        promise: how often each was to be used, in words.
        padded: used once more to fill the last step, dropped: left out for not filling it; as the schedule promises.
        missing: used less often than the batches taken promised, repeated: more often. Faults.
        batches: a rank took, before a resume too; of `whole` in the epoch, where that is known.
        blind: batches, over all ranks, whose indices are not known. Then none are known to be missing.
        ordered: every rank read in the dataset's order.
        apart: says that the launcher started processes that the trainer does not know, and that do not exchange.
    """

    epoch: int
    loader: int | None
    samples: int | None
    used: int
    uses: int
    promise: str
    padded: Some
    dropped: Some
    missing: Some
    repeated: Some
    batches: int
    whole: int | None
    blind: int
    ordered: bool
    apart: str

    @property
    def clean(self) -> bool:
        """Whether every sample is known to have been used as often as promised."""
        return not (self.missing.count or self.repeated.count or self.blind or self.apart or self.promise == UNKNOWN)

    def __str__(self) -> str:
        loader = f", loader {self.loader}" if self.loader is not None else ""
        stopped = self.whole is not None and self.batches < self.whole
        after = f" (stopped after {self.batches:,} of {self.whole:,} batches)" if stopped else ""
        return f"epoch {self.epoch + 1}{loader}: {'; '.join([self._amount(), *self._exceptions()])}{after}"

    def _amount(self) -> str:
        if self.blind and not self.uses:
            return f"nothing is known of the samples used: the {self.blind:,} batches came without indices"
        of = f" of {self.samples:,}" if self.samples not in (None, self.used) else ""
        if self.missing.count or self.repeated.count:
            return f"{self.used:,}{of} samples used"
        order = ", in the dataset's order" if self.ordered else ""
        each = f" used, each {self.promise}" if of else f", each used {self.promise}"
        return f"{self.used:,}{of} samples{each}{order}"

    def _exceptions(self) -> list[str]:
        return [
            *self.padded.said("padded"),
            *self.dropped.said("dropped"),
            *self.missing.said("MISSING"),
            *self.repeated.said("REPEATED"),
            *([f"{self.blind:,} batches came without indices"] if self.blind and self.uses else []),
            *([self.apart] if self.apart else []),
        ]
